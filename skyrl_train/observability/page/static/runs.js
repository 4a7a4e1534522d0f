// The list of runs.
import { html, useEffect, useState } from "./vendor/preact.js";
import { Spark } from "./charts.js";
import { MOST_RUNS } from "./compare.js";
import { ago, duration, get, moment, number, plain, useAnswer } from "./util.js";

export function Runs() {
  const [tick, setTick] = useState(0), [chosen, setChosen] = useState([]);
  useEffect(() => {
    const timer = setInterval(() => { if (!document.hidden) setTick((old) => old + 1); }, 5000);
    return () => clearInterval(timer);
  }, []);
  const { data, error } = useAnswer(() => get("runs"), "runs", tick);
  useEffect(() => { document.title = "skyrl_train"; }, []);
  if (error && !data) return html`<main><div class="error">${error}</div></main>`;
  if (!data) return html`<main><div class="empty">Looking for runs …</div></main>`;
  const pick = (name) => setChosen((old) => (old.includes(name) ? old.filter((one) => one !== name) : [...old, name]));
  const compare = `#/compare?${new URLSearchParams(chosen.map((name) => ["run", name]))}`;
  return html`<header><div class="top"><span class="name">skyrl_train</span><span class="fact">${plain(data.folder)}</span></div><nav></nav></header>
  <main>
    ${error && html`<div class="error">${error} The list may be old.</div>`}
    <div class="bar"><span>${data.runs.length} ${data.runs.length === 1 ? "run" : "runs"}</span><span class="grow"></span>
      ${chosen.length > 1 ? html`<a href=${compare}>compare ${chosen.length > MOST_RUNS ? `the first ${MOST_RUNS} of ${chosen.length} marked` : chosen.length} runs</a>` : data.runs.length > 1 && html`<span>mark two or more to compare them</span>`}</div>
    ${data.runs.length === 0 ? html`<div class="empty">There is no run in this folder yet.</div>` : html`
    <div class="scroll"><table><thead><tr><th></th><th>run</th><th>state</th><th>reward</th><th class="n">last</th><th class="n">step</th>
      <th class="n">training</th><th class="n">sampled</th><th>mode</th><th>began</th><th>last sign</th></tr></thead><tbody>
      ${data.runs.map((row) => html`<tr key=${row.name} class=${chosen.includes(row.name) ? "chosen" : ""}>
        <td><input type="checkbox" aria-label="compare" checked=${chosen.includes(row.name)} onChange=${() => pick(row.name)} /></td>
        <td class="wrap"><a href=${`#/run/${encodeURIComponent(row.name)}/overview`}>${plain(row.title)}</a></td>
        <td><span class=${`state ${row.state}`}>${row.state}</span></td>
        <td><${Spark} points=${row.curve} /></td>
        <td class="n">${number(row.reward)}</td>
        <td class="n">${row.step}${row.total_steps ? ` / ${row.total_steps}` : ""}</td>
        <td class="n">${duration(row.elapsed_s)}</td>
        <td class="n">${number(row.tokens)}</td>
        <td>${plain(row.mode)}</td>
        <td>${moment(row.began)}</td>
        <td>${ago(row.written)}</td></tr>`)}
    </tbody></table></div>`}
  </main>`;
}
