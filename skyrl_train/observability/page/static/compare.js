// Which of several runs is better, and why: curves over each other, figures at an equal budget, settings that differ.
import { html, useEffect, useMemo, useState } from "./vendor/preact.js";
import { axisOf, Chart, TOKENS, useCurves } from "./charts.js";
import { duration, get, number, PALETTE, plain, Text, useAnswer, useStored, useTheme, value, withUnit } from "./util.js";

const COLOURS = [...PALETTE, "#7f6bb3", "#8a6d3b", "#667788"];
const CURVES = [
  ["reward/mean", "Reward", ""], ["loss/entropy", "Entropy", "nats"], ["time/step", "Duration of a step", "s"], ["async/idle_fraction", "Slots idle", "share"],
  ["staleness/mean", "Lag", "steps"], ["generate/response_tokens", "Response length", "tokens"], ["policy/grad_norm", "Gradient norm", ""],
  ["generate/truncated", "Truncated", "share"],
];
const NAMES = [TOKENS, ...CURVES.map(([name]) => name)];

export const MOST_RUNS = 12;

export function Compare({ query }) {
  const runs = query.getAll("run").slice(0, MOST_RUNS);
  useEffect(() => { document.title = "skyrl_train · Compare"; }, []);
  return html`<header><div class="top"><span class="name"><a href="#/">runs</a> / compare ${runs.length}</span></div><nav></nav></header>
    <main><${Comparison} runs=${runs} link=${(run) => `#/run/${encodeURIComponent(run)}/overview`} /></main>`;
}

// `link`: the address of a run; without it, the names are no links. `opens`: the axis to begin with; without it, the last choice.
export function Comparison({ runs, link, opens }) {
  const [axis, setAxis] = opens ? useState(opens) : useStored("compare.axis", "step"), [smooth, setSmooth] = useState(false), [range, setRange] = useState(null);
  useTheme();
  const key = runs.join("\n");
  const { data, error } = useAnswer(() => get("compare", { run: runs, axis }), `${key} ${axis}`, "");
  const curves = useAnswer(() => Promise.all(runs.map((run) => get("metrics", { run, name: NAMES }))), key, "").data;
  if (error) return html`<div class="error">${plain(error)}</div>`;
  if (!data || !curves) return html`<div class="empty">Reading runs …</div>`;
  const names = data.runs.map((run) => plain(run.title));
  const title = { step: (one) => `${number(one, 6)} steps`, elapsed: (one) => `${duration(one)} of training`, tokens: (one) => `${number(one)} sampled tokens` }[axis];
  const best = Math.max(...data.at.runs.map((run) => run.reward ?? -Infinity));
  return html`
    <div class="bar"><span class="choice">at equal ${Object.entries({ step: "steps", elapsed: "time", tokens: "tokens" }).map(([one, label]) => html`<button aria-pressed=${axis === one} onClick=${() => { setRange(null); setAxis(one); }}>${label}</button>`)}</span>
      <button aria-pressed=${smooth} onClick=${() => setSmooth(!smooth)}>smooth</button>${range && html`<button onClick=${() => setRange(null)}>show all</button>`}</div>
    <div class="scroll"><table><thead><tr><th>run</th><th class="n">reward at ${title(data.at.budget)}</th><th class="n">95 % interval</th><th class="n">best step</th><th class="n">steps</th><th class="n">a step takes</th>
      <th class="n">sampled/s</th><th class="n">slots idle</th><th class="n">lag</th><th class="n">truncated</th><th class="n">reached</th></tr></thead><tbody>
      ${data.at.runs.map((at, index) => html`<tr><td class="wrap"><i class="swatch" style=${{ background: COLOURS[index % COLOURS.length] }}></i>${link ? html`<a href=${link(runs[index])}>${names[index]}</a>` : names[index]}</td>
        <td class="n">${at.reward === best ? html`<b>${number(at.reward)}</b>` : number(at.reward)}</td><td class="n">${at.low === null || at.low === undefined ? "–" : `${number(at.low)} – ${number(at.high)}`}</td>
        <td class="n">${number(at.best)}</td><td class="n">${number(at.steps)}</td><td class="n">${withUnit(at.step_s, "s")}</td><td class="n">${number(at.sampled_per_s)}</td><td class="n">${withUnit(at.idle, "share")}</td>
        <td class="n">${number(at.lag)}</td><td class="n">${withUnit(at.truncated, "share")}</td><td class="n">${title(data.at.reached[index])}</td></tr>`)}
    </tbody></table></div>
    <p><${Text}>${data.said}<//></p>
    <p class="note">The reward is the mean over the steps in the last tenth of the budget that all runs have reached. Intervals come from a bootstrap of blocks of these steps: they tell the noise of steps, not of seeds.</p>
    <div class="grid">${CURVES.filter(([name]) => curves.some((run) => run.mean[name]?.some((one) => one !== null))).map(([name, label, unit]) => html`<${Overlay} key=${name} name=${name} label=${label} unit=${unit}
      curves=${curves} names=${names} axis=${axis} smooth=${smooth} range=${range} onRange=${setRange} />`)}</div>
    <h3>Settings that differ</h3>
    ${data.settings.length === 0 ? html`<p class="note">None.</p>` : html`<div class="scroll"><table><thead><tr><th>setting</th>${names.map((name, index) => html`<th><i class="swatch" style=${{ background: COLOURS[index % COLOURS.length] }}></i>${name}</th>`)}</tr></thead>
      <tbody>${data.settings.map((row) => html`<tr key=${row.key}><td class="mono"><${Text}>${row.key}<//></td>${row.values.map((one) => html`<td class="mono wrap"><${Text}>${value(one)}<//></td>`)}</tr>`)}</tbody></table></div>`}`;
}

function Overlay({ name, label, unit, curves, names, axis, smooth, range, onRange }) {
  const { x, series } = useMemo(() => {
    const xs = curves.map((data) => (data.step?.length ? axisOf(data, axis) : []));
    const all = [...new Set(xs.flat())].sort((a, b) => a - b), place = new Map(all.map((one, index) => [one, index]));
    const lines = curves.map((data, run) => {
      const values = Array(all.length).fill(null), own = data.mean[name] ?? [];
      (smooth ? smoothed(own) : own).forEach((one, index) => { values[place.get(xs[run][index])] = one; });
      return { label: names[run], values, stroke: COLOURS[run % COLOURS.length], dash: run >= COLOURS.length ? [5, 3] : undefined };
    });
    return { x: all, series: lines };
  }, [curves, axis, smooth, name]);
  return html`<div class="card"><h2>${label}<span class="unit">${unit}</span></h2><${Chart} x=${x} series=${series} unit=${unit} axis=${axis} range=${range} onRange=${onRange} legend=${false} group="compare" /></div>`;
}

// The mean over the values around each one, a fortieth of all on both sides.
function smoothed(values) {
  const around = Math.max(1, Math.round(values.length / 40));
  return values.map((one, index) => {
    const near = values.slice(Math.max(0, index - around), index + around + 1).filter((other) => other !== null);
    return one === null || !near.length ? null : near.reduce((sum, other) => sum + other, 0) / near.length;
  });
}
