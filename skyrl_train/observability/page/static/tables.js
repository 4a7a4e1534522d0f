// Evaluations, engines, alarms, and what went wrong.
import { html, useState } from "./vendor/preact.js";
import { Chart, zeroBased } from "./charts.js";
import { ago, bytes, get, moment, number, PALETTE, plain, seconds, Text, useAnswer, usePaced, useStored, useTheme, versionColour, withUnit } from "./util.js";

export function Evaluations({ run, ticks }) {
  useTheme();
  const { data, error } = useAnswer(() => get("evaluations", { run }), run, ticks.evaluations);
  if (error) return html`<div class="error">${plain(error)}</div>`;
  if (!data) return html`<div class="empty">Reading evaluations …</div>`;
  if (!data.length) return html`<div class="empty">No policy was evaluated (trainer.eval).</div>`;
  const rows = [...data].sort((a, b) => a.step - b.step), numbers = [...new Set(rows.flatMap((row) => Object.keys(row)))].filter((key) => rows.some((row) => typeof row[key] === "number") && key !== "step");
  // The figures of the only data source are those of all prompts.
  const sources = new Set(numbers.map((key) => /^eval\/(.*)\/[^/]*$/.exec(key)?.[1]).filter(Boolean));
  const keys = numbers.filter((key) => sources.size > 1 || !/^eval\/.*\//.test(key));
  const shown = keys.filter((key) => /pass@|avg@|reward|truncated|response_tokens/.test(key)).slice(0, 24);
  const x = rows.map((row) => row.step);
  return html`<div class="grid small">${rows.length > 1 && shown.map((key) => html`<div class="card" key=${key}><h2>${plain(key)}<span class="now">${number(rows.at(-1)[key])}</span></h2>
      <${Chart} x=${x} series=${[{ label: key, values: rows.map((row) => (typeof row[key] === "number" ? row[key] : null)), stroke: PALETTE[0] }]} height=${110} legend=${false} yRange=${zeroBased} /></div>`)}</div>
    <div class="scroll below"><table><thead><tr><th class="n">step</th>${keys.map((key) => html`<th class="n">${plain(key.replace(/^eval\//, ""))}</th>`)}<th></th></tr></thead>
      <tbody>${[...rows].reverse().map((row) => html`<tr key=${row.step}><td class="n">${row.step}</td>${keys.map((key) => html`<td class="n">${number(row[key])}</td>`)}
        <td><a href=${`#/run/${encodeURIComponent(run)}/samples?phase=eval&step=${row.step}`}>samples</a></td></tr>`)}</tbody></table></div>`;
}

export function Engines({ run, ticks }) {
  useTheme();
  const { data, error, key } = useAnswer(async () => ({ engines: await get("engines", { run }) }), run, ticks.events);
  if (error && !data) return html`<div class="error">${plain(error)}</div>`;
  if (!data) return html`<div class="empty">Reading events …</div>`;
  const engines = Object.entries(data.engines ?? {});
  if (!engines.length) return html`<div class="empty">The last command of this run has recorded no state of its engines.</div>`;
  const newest = Math.max(...engines.map(([, points]) => points.at(-1)[0]));
  const several = engines.length > 1, shares = engineShares(engines.map(([, points]) => points));
  const cached = engines.some(([, points]) => points.some((point) => point[7] !== null));
  return html`<div class="scroll"><table><thead><tr><th>engine</th><th>state</th><th>version</th><th class="n">running</th><th class="n">waiting</th><th class="n">tokens/s</th>${several && html`<th class="n">of all requests</th><th class="n">of all tokens</th>`}${cached && html`<th class="n">KV cache</th>`}<th>last sign</th></tr></thead><tbody>
      ${engines.map(([name, points], index) => { const [at, state, version, running, waiting, paused, speed, cache] = points.at(-1); return html`<tr><td class="when">engine ${name}</td>
        <td><span class=${`state ${{ healthy: "live", dead: "failed", retired: "stopped" }[state] ?? "silent"}`}>${plain(state)}${paused ? ", paused" : ""}</span></td>
        <td><i class="swatch" style=${{ background: versionColour(version) }}></i>${version ?? "–"}</td><td class="n">${number(running)}</td><td class="n">${number(waiting)}</td><td class="n">${number(speed)}</td>
        ${several && shares.map((of) => html`<td class="n">${of === null ? "–" : html`<span class="share"><span class="track"><i style=${{ width: `${Math.round(100 * of[index])}%` }}></i></span>${withUnit(of[index], "share")}</span>`}</td>`)}${cached && html`<td class="n">${withUnit(cache, "share")}</td>`}<td>${ago(at)}</td></tr>`; })}
    </tbody></table></div>
    <p class="note">${several ? "Shares and curves" : "Curves"} are of the newest part of the record, ${seconds(newest - Math.min(...engines.map(([, points]) => points[0][0])))}. ${several ? "Requests count while they run or wait. " : ""}The timeline has the versions over time.</p>
    <div class="grid small">${engines.slice(0, 32).map(([name, points]) => { const x = points.map((point) => point[0] - newest); const of = (index) => points.map((point) => point[index]); return html`<div class="card" key=${name}><h2>Engine ${name}<span class="unit">requests</span><span class="now">${number(points.at(-1)[3])}</span></h2>
      <${Chart} x=${x} axis="s before the newest event" height=${120} yRange=${zeroBased} series=${[{ label: "running", values: of(3), stroke: PALETTE[0] }, { label: "waiting", values: of(4), stroke: PALETTE[1] }, ]} /></div>
      <div class="card" key=${`${name} speed`}><h2>Engine ${name}<span class="unit">tokens/s</span><span class="now">${number(points.at(-1)[6])}</span></h2>
      <${Chart} x=${x} axis="s before the newest event" height=${120} yRange=${zeroBased} series=${[{ label: "sampled", values: of(6), stroke: PALETTE[2] }]} /></div>
      ${cached && html`<div class="card" key=${`${name} cache`}><h2>Engine ${name}<span class="unit">KV cache in use</span><span class="now">${withUnit(points.at(-1)[7], "share")}</span></h2>
      <${Chart} x=${x} axis="s before the newest event" height=${120} unit="share" yRange=${zeroBased} series=${[{ label: "in use", values: of(7), stroke: PALETTE[3] }]} /></div>`}`; })}</div>`;
}

// Of each engine the share of all requests (weighted by time) and of all tokens; null: there were none.
function engineShares(engines) {
  const sums = [(point) => (point[3] ?? 0) + (point[4] ?? 0), (point) => point[6] ?? 0].map((rate) =>
    engines.map((points) => points.reduce((sum, point, index) => sum + (index ? rate(point) * (point[0] - points[index - 1][0]) : 0), 0)));
  return sums.map((of) => { const all = of.reduce((sum, one) => sum + one, 0); return all > 0 ? of.map((one) => one / all) : null; });
}

// Does it learn, what bounds its speed, what failed. It is computed again at each percent of a run and when its state changes.
export function Verdict({ run, info }) {
  const percent = Math.floor(info.step / Math.max(1, (info.total_steps ?? 0) / 100));
  const { data } = useAnswer(() => get("verdict", { run }), run, `${percent} ${info.state}`);
  return data && html`<div class="card verdict"><h2>The whole run</h2>${data.map((sentence) => html`<div><${Text}>${sentence}<//></div>`)}</div>`;
}

// The alarms or the tuning advice after the last step. Other views than the overview have the most urgent alarm only.
export function Advice({ run, info, ticks, view }) {
  // Before the first step, only failures tell something.
  const { data } = useAnswer(() => get("advice", { run }), run, info.step ? `step ${ticks.metrics}` : `event ${ticks.events}`);
  const [stored, store] = useStored(`muted.${run}`, "");
  const muted = stored.split(" ").filter(Boolean), all = data ?? [];
  const loud = all.filter((one) => !muted.includes(one.id)), quiet = all.length - loud.length;
  const shown = loud.filter((one, index) => view === "overview" || (one.level === "alarm" && index === 0)), more = loud.length - shown.length;
  return html`${shown.map((one) => html`<div class=${`advice ${one.level}`} key=${one.id}>
    <button class="mute" title="hide it in this browser" onClick=${() => store([...muted, one.id].join(" "))}>mute</button>
    <b>${one.level === "alarm" ? "▲ Alarm" : "Advice"}</b> <${Text}>${one.finding}<//> <${Text}>${one.action}<//> <span class="docs">${plain(one.docs)}</span>
    ${more > 0 && html` <a href=${`#/run/${encodeURIComponent(run)}/overview`}>and ${more} more</a>`}</div>`)}
    ${quiet > 0 && view === "overview" && html`<p class="note">${quiet} muted <button onClick=${() => store("")}>show</button></p>`}`;
}

export function Failures({ run, ticks }) {
  const { data, error } = useAnswer(() => get("incidents", { run }), run, `${usePaced(ticks.events, "incidents") ?? 0}`);
  const [file, setFile] = useState(null);
  if (error && !data) return html`<div class="error">${plain(error)}</div>`;
  if (!data) return html`<div class="empty">Reading events …</div>`;
  const { events, logs } = data, chosen = file ?? logs[0]?.name;
  return html`${!events ? html`<p class="note">This run has recorded no events yet. Runs of older versions have none.</p>` : html`
    <h3>Alarms and advice</h3>
    ${events.alarms.length === 0 ? html`<p class="note">None.</p>` : html`<div class="scroll"><table class="told"><thead><tr><th></th><th class="n">from step</th><th class="n">to step</th><th>when it began</th><th>what to do</th><th>since</th></tr></thead><tbody>
      ${events.alarms.map((row) => html`<tr><td><span class=${row.level === "alarm" ? "state failed" : ""}>${plain(row.id)}</span></td><td class="n">${row.step}</td><td class="n">${row.ended ?? ""}</td>
        <td class="wrap"><${Text}>${row.finding}<//></td><td class="wrap"><${Text}>${row.action}<//></td><td class="when">${moment(row.at)}</td></tr>`)}</tbody></table></div>`}
    <h3>Failed groups and attempts</h3>
    ${events.failures.length === 0 ? html`<p class="note">None.</p>` : html`<div class="scroll"><table class="told"><thead><tr><th class="n">times</th><th>what</th><th>why</th><th>groups, for example</th><th>the first of them again</th><th>first</th><th>last</th></tr></thead><tbody>
      ${events.failures.map((row) => html`<tr><td class="n">${row.count}</td><td>${row.kind === "failed" ? html`<span class="state failed">failed for good</span>` : "failed attempt"}</td><td class="wrap mono"><${Text}>${row.reason}<//>${row.place && html`<div class="note"><${Text}>${row.place}<//></div>`}</td>
        <td>${row.examples.join(", ")}</td><td class="wrap mono">${row.again.split(" ").map((word) => html`<span class="word"><${Text}>${word}<//></span> `)}</td><td class="when">${moment(row.first)}</td><td class="when">${ago(row.last)}</td></tr>`)}</tbody></table></div>`}
    <h3>Warnings</h3>
    ${events.warnings.length === 0 ? html`<p class="note">None.</p>` : html`<div class="scroll"><table class="told"><thead><tr><th class="n">times</th><th>level</th><th>text</th><th>from</th><th>last</th></tr></thead><tbody>
      ${events.warnings.map((row) => html`<tr><td class="n">${row.count}</td><td>${row.level}</td><td class="wrap mono"><${Text}>${row.text}<//></td><td class="mono">${plain(row.source)}</td><td class="when">${ago(row.last)}</td></tr>`)}</tbody></table></div>`}
    <h3>Commands</h3>
    <div class="scroll"><table class="told"><tbody>${events.processes.map((event) => html`<tr><td class="when">${moment(event.at)}</td><td class="when">${{ process: "opened", run: "training began", resume: "training went on", end: "ended" }[event.kind]}</td>
      <td class="wrap"><${Text}>${event.kind === "process" ? `${event.host}, pid ${event.pid}, version ${event.version}, Python ${event.python}${event.git ? `, git ${event.git.slice(0, 10)}` : ""}: ${event.command.join(" ")}`
        : event.kind === "end" ? `${event.reason} after step ${event.step}${event.error ? `: ${event.error}` : ""}` : `after step ${event.step} of ${event.total_steps}`}<//></td></tr>`)}</tbody></table></div>
    ${(events.lost > 0 || events.sampled_out > 0) && html`<p class="note">The record lacks ${number(events.lost)} events that could not be written, and ${number(events.sampled_out)} that trainer.max_events_per_s left out.</p>`}`}
    <h3>Logs</h3>
    ${logs.length === 0 ? html`<p class="note">None.</p>` : html`<div class="bar"><select value=${chosen} onChange=${(event) => setFile(event.target.value)}>${logs.map((log) => html`<option value=${log.name}>${plain(log.name)} (${bytes(log.bytes)}, ${ago(log.written)})</option>`)}</select></div>
      <${Log} key=${chosen} run=${run} file=${chosen} tick=${ticks.events} />`}`;
}

function Log({ run, file, tick }) {
  const { data, error } = useAnswer(() => get("log", { run, file }), `${run} ${file}`, tick);
  if (error && !data) return html`<div class="error">${plain(error)}</div>`;
  return html`<pre class="log mono"><${Text}>${data?.text || (data ? "(empty)" : "…")}<//></pre>`;
}
