// The frame: which view of which run the address names, and the header.
import { html, render, useEffect, useState } from "./vendor/preact.js";
import { Compare } from "./compare.js";
import { Metrics, Overview } from "./overview.js";
import { Runs } from "./runs.js";
import { Samples } from "./samples.js";
import { Settings } from "./settings.js";
import { Advice, Engines, Evaluations, Failures, Verdict } from "./tables.js";
import { Timeline } from "./timeline.js";
import { ago, duration, get, number, plain, useAnswer, useLive } from "./util.js";

const VIEWS = {
  overview: ["Overview", Overview], timeline: ["Timeline", Timeline], samples: ["Samples", Samples],
  evaluations: ["Evaluations", Evaluations], engines: ["Engines", Engines], failures: ["Failures", Failures],
  metrics: ["Metrics", Metrics], config: ["Configuration", Settings],
};

// #/run/NAME/VIEW?key=value, #/compare?run=A&run=B, or the list of runs.
function place() {
  const [path, query] = location.hash.slice(1).split("?");
  let parts;
  try { parts = path.split("/").slice(1).map(decodeURIComponent); } catch { parts = []; }
  return { parts, query: new URLSearchParams(query ?? "") };
}

function Page() {
  const [at, setAt] = useState(place);
  useEffect(() => {
    const move = () => setAt(place());
    addEventListener("hashchange", move);
    return () => removeEventListener("hashchange", move);
  }, []);
  const [kind, run, view] = at.parts;
  if (kind === "run" && run) return html`<${Run} key=${run} run=${run} view=${view in VIEWS ? view : "overview"} query=${at.query} />`;
  if (kind === "compare") return html`<${Compare} query=${at.query} />`;
  return html`<${Runs} />`;
}

function Run({ run, view, query }) {
  const [tick, setTick] = useState(0);
  const { data: info, error } = useAnswer(() => get("run", { run }), run, tick);
  const ticks = useLive(run, info?.parts);
  useEffect(() => { setTick((old) => old + 1); }, [ticks.metrics, ticks.state]);
  // A run that falls silent writes nothing that could be noticed.
  useEffect(() => {
    const timer = setInterval(() => { if (!document.hidden) setTick((old) => old + 1); }, 30000);
    return () => clearInterval(timer);
  }, []);
  // On a narrow screen, the name of the view may be out of sight.
  useEffect(() => {
    const nav = document.querySelector("nav"), here = nav?.querySelector("[aria-current]");
    if (here) nav.scrollLeft = here.offsetLeft - nav.offsetLeft - (nav.clientWidth - here.clientWidth) / 2;
  }, [view, !info]);
  useEffect(() => { if (info) document.title = `${plain(info.title)} · ${VIEWS[view][0]}`; }, [info?.title, view]);
  if (!info) return html`<header><div class="top"><span class="name"><a href="#/">runs</a> / ${plain(run)}</span></div><nav></nav></header>
    <main>${error ? html`<div class="error">${plain(error)}</div>` : html`<div class="empty">Reading the run …</div>`}</main>`;
  const View = VIEWS[view][1];
  return html`<header>
    <div class="top"><span class="name"><a href="#/">runs</a> / ${plain(info.title)}</span>
      <span class=${`state ${info.state}`}>${info.state}${info.state === "silent" ? `, last sign ${ago(info.written)}` : ""}</span>
      <span class="fact">${plain(info.mode)}</span>
      <span class="fact">step <b>${info.step}${info.total_steps ? ` / ${info.total_steps}` : ""}</b></span>
      <span class="fact">reward <b>${number(info.reward)}</b></span>
      <span class="fact">trained for <b>${duration(info.elapsed_s)}</b></span>
      ${info.tokens !== undefined && info.tokens !== null && html`<span class="fact">sampled <b>${number(info.tokens)}</b> tokens</span>`}
    </div>
    <nav>${Object.entries(VIEWS).map(([key, [label]]) => html`<a href=${`#/run/${encodeURIComponent(run)}/${key}`} aria-current=${view === key ? "page" : undefined}>${label}</a>`)}</nav>
    <div class="progress"><i style=${{ width: `${info.total_steps ? Math.min(100, (100 * info.step) / info.total_steps) : 0}%` }}></i></div>
  </header>
  <main>${error && html`<div class="error">${plain(error)} What is shown may be old.</div>`}${view === "overview" && html`<${Verdict} run=${run} info=${info} />`}<${Advice} run=${run} info=${info} ticks=${ticks} view=${view} /><${View} run=${run} info=${info} ticks=${ticks} query=${query} /></main>`;
}

const root = document.getElementById("page");
root.textContent = "";
render(html`<${Page} />`, root);
