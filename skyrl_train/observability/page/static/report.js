// The pictures of a report or of a comparison that is one file: the page's views, over the answers that the file contains.
import { html, render, useEffect, useRef, useState } from "./vendor/preact.js";
import { Comparison } from "./compare.js";
import { Lanes } from "./lanes.js";
import { Overview } from "./overview.js";
import { get, useAnswer, useTheme, versionColour } from "./util.js";

function Steps({ run }) {
  const { data } = useAnswer(() => get("timeline", { run }), run);
  const canvas = useRef(null), scroller = useRef(null), lanes = useRef(null);
  const [view, setView] = useState(null), [hover, setHover] = useState(null), [height, setHeight] = useState(0);
  const theme = useTheme();
  useEffect(() => {
    if (!data) return;
    // The wheel scrolls the document; the lanes would take it to zoom.
    scroller.current.addEventListener("wheel", (event) => event.stopImmediatePropagation(), true);
    lanes.current = new Lanes(canvas.current, scroller.current, {
      onView: setView, onPick: () => {}, onStep: () => {}, onHover: (lines, x, y) => setHover(lines && { lines, x, y }),
    });
    return () => lanes.current.close();
  }, [data]);
  useEffect(() => {
    if (!data) return;
    lanes.current.show(data, view ?? data, { order: "slot", strip: 0, picked: null, step: null });
    const samples = Math.max(1, lanes.current.samples);
    setHeight(Math.min(900, lanes.current.head + lanes.current.lanes * (Math.max(10, Math.min(22, samples * 3)) + 3) + 8));
  }, [data, view, theme, height]);
  if (!data) return html`<p class="note">The record has no events of these steps.</p>`;
  const versions = [...new Set(data.groups.flatMap((group) => group.requests.flatMap((one) => one[6].map((segment) => segment[0]))))].sort((a, b) => a - b);
  return html`<div class="bar legend">${versions.slice(0, 12).map((version) => html`<span><i class="swatch" style=${{ background: versionColour(version) }}></i>v${version}</span>`)}</div>
    <div class="lanes" style=${{ height: `${height}px` }} ref=${scroller}><canvas ref=${canvas} aria-label="timeline"></canvas>
      ${hover && html`<div class="tip" style=${{ left: `${Math.max(0, Math.min(hover.x + 14, scroller.current.clientWidth - 250))}px`, top: `${hover.y + 16 + scroller.current.scrollTop}px` }}>${hover.lines.map((line) => html`<div>${line}</div>`)}</div>`}
    </div>
    <p class="note">A lane is a slot for a group, a strip in it a sample, a colour the policy version that sampled. Pale: generated, waits to be trained; ▼ the step that trained it.
      ${data.all_groups > data.groups.length ? ` ${data.groups.length} of ${data.all_groups} groups are drawn.` : ""}</p>`;
}

const pictures = { overview: Overview, timeline: Steps, comparison: Comparison };
for (const place of document.querySelectorAll("[data-picture]")) {
  const { picture, ...properties } = place.dataset;
  place.textContent = "";
  render(html`<${pictures[picture]} ticks=${{}} ...${JSON.parse(properties.with)} />`, place);
}
