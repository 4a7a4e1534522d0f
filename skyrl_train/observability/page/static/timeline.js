// The timeline: which version sampled what, when, and who waited for whom.
import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { Lanes, ORDERS } from "./lanes.js";
import { get, number, seconds, Text, useAnswer, usePaced, useTheme, versionColour } from "./util.js";

const STRIPS = { 0: "fit", 1: "dense", 3: "normal", 8: "tall" };

export function Timeline({ run, info, ticks, query }) {
  const step = query.get("step");
  // `asked`: the window whose data were loaded; null: the last steps, which move on with a live run.
  const [asked, setAsked] = useState(null);
  const [view, setView] = useState(null);
  const [order, setOrder] = useState("slot"), [strip, setStrip] = useState(0);
  const [picked, setPicked] = useState(null), [lit, setLit] = useState(null), [hover, setHover] = useState(null);
  const theme = useTheme();
  const following = asked === null && !step;
  const events = usePaced(ticks.events, "timeline");
  const load = () => get("timeline", asked ? { run, ...asked } : { run, step });
  // The key stays: the old picture is shown until the next one is there.
  const { data, error } = useAnswer(load, run, `${JSON.stringify(asked)} ${step} ${following || info.state === "live" ? events : ""}`);
  const canvas = useRef(null), scroller = useRef(null), lanes = useRef(null);
  const shown = view ?? (data ? { t0: data.t0, t1: data.t1 } : null);
  const latest = useRef({});
  Object.assign(latest.current, { data, shown });

  useEffect(() => {
    if (!canvas.current || lanes.current) return;
    let timer = 0;
    lanes.current = new Lanes(canvas.current, scroller.current, {
      onView: (next) => {
        setView(next);
        clearTimeout(timer);
        timer = setTimeout(() => {
          const loaded = latest.current.data, length = next.t1 - next.t0;
          const wide = loaded.t1 - loaded.t0;
          // Loaded with as much again on both sides, and again if it is left or much is hidden by the wider window.
          if (next.t0 < loaded.t0 || next.t1 > loaded.t1 || wide > 8 * length) setAsked({ t0: next.t0 - length, t1: next.t1 + length });
        }, 150);
      },
      onPick: (group) => setPicked(group),
      onStep: (one) => setLit((old) => (old === one ? null : one)),
      onHover: (lines, x, y) => setHover(lines && { lines, x, y }),
    });
  });
  useEffect(() => () => lanes.current?.close(), []);
  const same = useMemo(() => (picked && data ? data.groups.find((one) => one.group === picked.group && one.process === picked.process) ?? null : null), [picked, data]);
  const spacer = useRef(null);
  useEffect(() => {
    if (!data || !shown || !lanes.current) return;
    lanes.current.show(data, shown, { order, strip, picked: same, step: lit });
    spacer.current.style.height = `${Math.max(0, lanes.current.full - scroller.current.clientHeight)}px`;
  }, [data, shown?.t0, shown?.t1, order, strip, same, lit, theme]);

  if (error && !data) return html`<div class="error">${error}</div>`;
  if (data === null && !error) {
    // Not read yet, or there is no record: the server answers null.
    return html`<${Unrecorded} run=${run} ticks=${ticks} />`;
  }
  const reset = () => { setAsked(null); setView(null); setLit(null); setPicked(null); if (step) location.hash = `#/run/${encodeURIComponent(run)}/timeline`; };
  const versions = [...new Set(data.groups.flatMap((group) => group.requests.flatMap((one) => one[6].map((segment) => segment[0]))))].sort((a, b) => a - b);
  return html`
    <div class="bar">
      <span class="choice"><button title="zoom out" onClick=${() => lanes.current.zoom(1.6, lanes.current.width / 2)}>−</button>
        <button title="zoom in" onClick=${() => lanes.current.zoom(1 / 1.6, lanes.current.width / 2)}>+</button>
        <button title="earlier" onClick=${() => lanes.current.pan(-0.5)}>◂</button><button title="later" onClick=${() => lanes.current.pan(0.5)}>▸</button>
        <button onClick=${reset} aria-pressed=${following && !view}>last steps</button>
        <button onClick=${() => { setView({ t0: data.first, t1: data.last }); setAsked({ t0: data.first, t1: data.last }); }}>whole run</button></span>
      <label>order by <select value=${order} onChange=${(event) => setOrder(event.target.value)}>${Object.entries(ORDERS).map(([key, name]) => html`<option value=${key}>${name}</option>`)}</select></label>
      <label>lanes <select value=${strip} onChange=${(event) => setStrip(Number(event.target.value))}>${Object.entries(STRIPS).map(([key, name]) => html`<option value=${key}>${name}</option>`)}</select></label>
      ${lit !== null && html`<button onClick=${() => setLit(null)}>step ${lit} only ✕</button>`}
      <span class="grow"></span>
      <span class="legend">${versions.slice(0, 12).map((version) => html`<span><i class="swatch" style=${{ background: versionColour(version) }}></i>v${version} </span>`)}${versions.length > 12 && "…"}</span>
    </div>
    ${error && html`<div class="error">${error}</div>`}
    ${data.density && html`<p class="note">${number(data.all_groups)} groups are in view: the number of responses by version is drawn, and the ${data.groups.length} longest groups. Zoom in to see all.</p>`}
    <div class="lanes" ref=${scroller}>
      <canvas ref=${canvas} tabindex="0" aria-label="timeline"></canvas><div ref=${spacer}></div>
      ${hover && html`<div class="tip" style=${{ left: `${Math.min(hover.x + 14, (scroller.current?.clientWidth ?? 400) - 250)}px`, top: `${hover.y + 16 + scroller.current.scrollTop}px` }}>${hover.lines.map((line) => html`<div>${line}</div>`)}</div>`}
    </div>
    <p class="note">A lane is a slot for a group, a strip in it a sample, a colour the policy version that sampled. Hatched: an environment (grey), or the tools of an agent (dark), whose thin line is its life. Dotted: its responses are under way, or were left out (trainer.max_events_per_s). Pale: generated, waits to be trained; ▼ the step that trained it. Above the trainer: checkpoints.
      Wheel: zoom. Drag: move. Click a step to light its groups, a group for its responses.</p>
    ${same && html`<${GroupDetails} run=${run} group=${same} first=${data.first} />`}`;
}

function Unrecorded({ run, ticks }) {
  const { data, key } = useAnswer(async () => ({ window: await get("timeline", { run }) }), `${run} there?`, ticks.events);
  return data && data.window === null ? html`<div class="empty">This run has recorded no events yet. Runs of older versions have none.</div>`
    : html`<div class="empty">Reading events …</div>`;
}

function GroupDetails({ run, group, first }) {
  const calls = [...group.environments.map(([sample, t0, t1, call, ok]) => [sample, t0, t1, `environment: ${call}`, ok ? "" : "failed"]),
    ...group.tools.map(([sample, t0, t1, names]) => [sample, t0, t1, `${names.length > 1 ? "tools" : "tool"}: ${names.join(", ")}`, ""]),
    ...group.agents.map(([sample, t0, t1, turns, ok]) => [sample, t0, t1, `agent, ${turns} ${turns === 1 ? "response" : "responses"}`, ok ? "" : "failed"])];
  const rows = [...group.requests, ...calls].sort((a, b) => (a[0] ?? 0) - (b[0] ?? 0) || a[1] - b[1]);
  const since = (time) => (time === null || time === undefined ? "–" : `${(time - first).toFixed(2)} s`);
  return html`<div class="card"><h2>Group ${group.group}<span class="unit">${group.state}${group.step ? `, step ${group.step}` : ""}</span>
      <span class="now"><a href=${`#/run/${encodeURIComponent(run)}/samples?group=${group.group}${group.step ? `&step=${group.step}` : ""}`}>its samples</a></span></h2>
    <p class="note">admitted at ${since(group.begin)} with version ${group.version ?? "–"} · generated at ${since(group.finished)} · ended at ${since(group.ended)} · tokens ${number(group.tokens)}
      · reward ${number(group.reward)} · lag ${group.lag ?? "–"}${group.masked ? ` · ${group.masked} tokens masked as too old` : ""}${group.uid ? html` · prompt <${Text}>${group.uid}<//>` : ""}
      ${group.reason ? html` · <${Text}>${group.reason}<//>` : ""}</p>
    ${group.retries.map(([at, attempt, reason]) => html`<p class="note">attempt ${attempt} failed at ${since(at)}: <${Text}>${reason}<//></p>`)}
    ${rows.length === 0 ? html`<p class="note">Its responses are not recorded: they are still under way, or trainer.max_events_per_s left this group out.</p>` : html`
    <div class="scroll"><table><thead><tr><th class="n">sample</th><th class="n">submitted</th><th class="n">first token</th><th class="n">duration</th><th class="n">prompt</th><th>tokens by version</th><th>interrupted by</th><th>end</th></tr></thead><tbody>
      ${rows.map(([sample, submitted, firstToken, end, stop, prompt, segments, seams]) => (segments === undefined ? html`<tr><td class="n">${sample}</td><td class="n">${since(submitted)}</td><td class="n"></td>
        <td class="n">${seconds(firstToken - submitted)}</td><td class="n"></td><td colspan="2"><${Text}>${end}<//></td><td>${stop}</td></tr>` : html`<tr><td class="n">${sample}</td><td class="n">${since(submitted)}</td>
        <td class="n">${firstToken === null ? "–" : seconds(firstToken - submitted)}</td><td class="n">${seconds(end - submitted)}</td><td class="n">${prompt}</td>
        <td>${segments.map(([version, tokens]) => html`<span class="piece"><i class="swatch" style=${{ background: versionColour(version) }}></i>v${version}: ${tokens} </span>`)}</td>
        <td>${seams.join(", ")}</td><td>${stop}</td></tr>`))}
    </tbody></table></div>`}
  </div>`;
}
