// Does it learn, is it sane, who waits for whom: the first view of a run, and the curves of all its metrics.
import { html, useMemo, useState } from "./vendor/preact.js";
import { AXES, axisOf, Chart, faint, MetricCard, sharesOf, TOKENS, useCurves, zeroBased } from "./charts.js";
import { colour, get, number, PALETTE, useAnswer, usePaced, useStored, useTheme, withUnit } from "./util.js";

const [BLUE, ORANGE, GREEN, PINK, SKY] = PALETTE;

const WANTED = [
  TOKENS, "reward/mean", "reward/p10", "reward/p90", "reward/min", "reward/max", "reward/zero_variance_groups", "time/", "async/idle_fraction",
  "staleness/histogram/", "staleness/in_flight_histogram/", "staleness/in_queue_histogram/", "staleness/mean", "staleness/max", "inference/tokens_per_second", "policy/tokens_per_second",
  "generate/response_tokens", "generate/response_tokens_p50", "generate/response_tokens_p90", "generate/response_tokens_max",
  "generate/truncated", "generate/latency_s_p50", "generate/latency_s_p99", "loss/entropy", "policy/grad_norm", "policy/kl_to_reference",
  "off_policy/ess", "off_policy/kl_k3", "policy/ratio_mean", "policy/clip_fraction", "off_policy/clipped_fraction", "loss/policy", "loss/value",
  "critic/explained_variance", "inference/running_requests", "inference/waiting_requests", "perf/mfu", "system/gpu_utilization", "system/gpu_memory_share",
  "inference/busy_share", "inference/down_share",
];
const SANITY = [
  ["loss/entropy", "Entropy"], ["policy/grad_norm", "Gradient norm"], ["off_policy/kl_k3", "KL(behaviour || proximal)"],
  ["policy/kl_to_reference", "KL to reference"], ["off_policy/ess", "Effective sample size"], ["policy/clip_fraction", "Clipped tokens"],
  ["reward/zero_variance_groups", "Groups without signal"], ["generate/truncated", "Truncated"], ["critic/explained_variance", "Explained variance"],
  ["inference/running_requests", "Requests in the engines"], ["inference/waiting_requests", "Requests that wait there"], ["perf/mfu", "MFU of training"],
  ["system/gpu_utilization", "GPU utilization"], ["system/gpu_memory_share", "GPU memory"],
];

function AxisChoice({ axis, setAxis, data, range, setRange }) {
  const there = { step: true, elapsed: !!data?.elapsed_s, tokens: !!data?.mean[TOKENS] };
  return html`<div class="bar">
    <span class="choice">x: ${Object.entries(AXES).filter(([key]) => there[key]).map(([key, label]) => html`<button
      aria-pressed=${axis === key} onClick=${() => { setRange(null); setAxis(key); }}>${label}</button>`)}</span>
    ${range && html`<button onClick=${() => setRange(null)}>show all steps</button>`}
    <span class="grow"></span>
    <span>drag over a chart to zoom</span>
  </div>`;
}

export function Overview({ run, info, ticks }) {
  const [chosen, setAxis] = useStored("axis", "step");
  const [range, setRange] = useState(null);
  useTheme();
  const { data, error } = useCurves(run, WANTED, ticks.metrics);
  const evaluations = useAnswer(() => get("evaluations", { run }), run, ticks.evaluations).data ?? [];
  const checkpoints = useAnswer(() => get("checkpoints", { run }), run, usePaced(ticks.events, "checkpoints")).data ?? [];
  if (error) return html`<div class="error">${error}</div>`;
  if (!data) return html`<div class="empty">Reading metrics …</div>`;
  if (!data.step.length) return html`<div class="empty">No step has ended yet. ${info.state === "live" ? "Engines start and the first groups are generated." : ""}</div>`;
  const axis = { elapsed: data.elapsed_s, tokens: data.mean[TOKENS] }[chosen] ? chosen : "step";
  const x = axisOf(data, axis);
  const shared = { x, axis, range, onRange: setRange, group: "run", info, data };
  const metrics = Object.fromEntries(info.metrics.map((metric) => [metric.name, metric]));
  return html`
    <${AxisChoice} axis=${axis} setAxis=${setAxis} data=${data} range=${range} setRange=${setRange} />
    <div class="grid">
      <${Reward} ...${shared} evaluations=${evaluations} checkpoints=${checkpoints} />
      <${WhoWaits} ...${shared} />
      <${Lag} ...${shared} />
      <${Throughput} ...${shared} />
      <${Lengths} ...${shared} />
      <${Latency} ...${shared} />
    </div>
    <div class="grid small">
      ${SANITY.filter(([name]) => some(data.mean[name])).sort(([one], [other]) => isFlat(data.mean[one]) - isFlat(data.mean[other])).map(([name, title]) => html`<${MetricCard}
        key=${name} title=${title} metric=${metrics[name] ?? { name, unit: "", meaning: "" }} data=${data} x=${x} axis=${axis} range=${range} onRange=${setRange} />`)}
    </div>`;
}

const some = (values) => values?.some((one) => one !== null);
// Curves that never change come last.
const isFlat = (values) => new Set(values.filter((one) => one !== null)).size < 2;
const last = (values) => values?.findLast((one) => one !== null);

function Card({ title, unit, now, note, children }) {
  return html`<div class="card"><h2>${title}<span class="unit">${unit}</span><span class="now">${now}</span></h2>${children}${note && html`<p class="note">${note}</p>`}</div>`;
}

function Reward({ data, x, evaluations, checkpoints, ...shared }) {
  const [low, high, what] = some(data.mean["reward/p10"]) ? ["reward/p10", "reward/p90", "p10–p90"] : ["reward/min", "reward/max", "min–max"];
  // What happened after a step belongs to the first point that contains it.
  const pointOf = (wanted) => data.step.findIndex((step) => step >= wanted);
  // Checkpoints of later steps belong to steps that are lost, or whose rows come with the next answer; and so do evaluations.
  const marks = [...new Set(checkpoints.map(pointOf))].filter((mark) => mark >= 0);
  const draw = (u) => {
    u.ctx.fillStyle = PINK;
    for (const mark of marks) {
      const left = u.valToPos(x[mark], "x", true), bottom = u.bbox.top + u.bbox.height, size = 4 * devicePixelRatio;
      if (left < u.bbox.left || left > u.bbox.left + u.bbox.width) continue;
      u.ctx.beginPath();
      u.ctx.moveTo(left - size, bottom);
      u.ctx.lineTo(left, bottom - 2 * size);
      u.ctx.lineTo(left + size, bottom);
      u.ctx.fill();
    }
  };
  const series = [{ label: "mean", values: data.mean["reward/mean"] ?? [], stroke: GREEN, width: 2 }];
  const bands = [];
  if (some(data.mean[low])) {
    series.push({ label: what.split("–")[1], values: data.mean[high], stroke: faint(GREEN, "55"), width: 0.5 });
    series.push({ label: what.split("–")[0], values: data.mean[low], stroke: faint(GREEN, "55"), width: 0.5 });
    bands.push([2, 3, faint(GREEN, "26")]);
  }
  const measured = evaluations.filter((row) => typeof row["eval/reward"] === "number" && pointOf(row.step) >= 0);
  if (measured.length) {
    const dots = Array(data.step.length).fill(null);
    for (const row of measured) dots[pointOf(row.step)] = row["eval/reward"];
    series.push({ label: "evaluation", values: dots, stroke: ORANGE, points: true });
  }
  return html`<${Card} title="Reward" unit="return per sample" now=${number(last(data.mean["reward/mean"]))} note=${marks.length > 0 && html`<span class="checkpoint">▲</span> a checkpoint`}>
    <${Chart} x=${x} series=${series} bands=${bands} draw=${draw} ...${shared} /><//>`;
}

// Shares of each step's time, stacked. Parts of the trainer's time that overlap with something else are left out.
function WhoWaits({ data, x, ...shared }) {
  const shares = useMemo(() => {
    const of = (name, index) => data.mean[`time/${name}`]?.[index] ?? 0;
    const parts = data.step.map((_, index) => {
      const step = of("step", index) || 1;
      const waited = data.mean["time/wait_for_weight_sync"]?.[index];
      // Training waits for the evaluation on the engines first: the sync begins when it has ended.
      const evaluates = Math.min(of("wait_for_evaluation", index), waited ?? Infinity);
      const sync = of("gather", index) + (waited == null ? of("transfer", index) + of("pause", index) : waited - evaluates);
      const turns = of("sleep", index) + of("wake_up", index) + of("offload_states", index) + of("reload_states", index) + evaluates;
      let left = 1;
      return [of("train", index), sync, turns, of("wait_for_batch", index)].map((part) => {
        const share = Math.max(0, Math.min(left, part / step));
        left -= share;
        return share;
      });
    });
    return [0, 1, 2, 3].map((part) => parts.map((row) => row[part]));
  }, [data]);
  const top = (part) => data.step.map((_, index) => shares.slice(0, part + 1).reduce((sum, one) => sum + one[index], 0));
  const parts = [["training", SKY], ["weight sync", ORANGE], ["other turns", PINK], ["waits for groups", "#b9bec7"]];
  const shown = [3, 2, 1, 0].filter((part) => shares[part].some((one) => one > 0.0005));
  const series = shown.map((part) => ({
    label: parts[part][0], values: top(part), raw: shares[part], stroke: parts[part][1], fill: parts[part][1], width: 0,
  }));
  const idle = data.mean["async/idle_fraction"], engines = useMemo(() => enginesOf(data), [data]);
  if (some(idle)) series.push({ label: "slots idle", values: idle, stroke: colour("ink"), width: 1.5, dash: [4, 3] });
  return html`<${Card} title="Who waits" unit="share of the step"
    note=${some(idle) && "Filled: the trainer. Dashed: generation slots that were idle, because they waited for a new policy or for prompts."}>
    <${Chart} x=${x} series=${series} unit="share" yRange=${sharesOf} ...${shared} height=${engines ? 120 : 190} />
    ${engines && html`<div class="below">The engines (blank: idle)
      <${Chart} x=${x} series=${engines} unit="share" yRange=${sharesOf} ...${shared} height=${60} /></div>`}<//>`;
}

// Shares of each step's time in which the engines sample, are paused for new weights, or are down; the rest is idle. Null: the run
// has no figures (it is of an older version, or no look at the engines came before the end).
function enginesOf(data) {
  const busy = data.mean["inference/busy_share"];
  if (!some(busy)) return null;
  const parts = data.step.map((_, index) => {
    const down = data.mean["inference/down_share"]?.[index] ?? 0, up = 1 - down;
    const paused = Math.min(up, up * (data.mean["time/pause"]?.[index] ?? 0) / (data.mean["time/step"]?.[index] || 1));
    return busy[index] == null ? [null, null, null] : [Math.min(up - paused, up * busy[index]), paused, down];
  });
  const names = [["sampling", SKY], ["paused", ORANGE], ["down", PINK]];
  return [2, 1, 0].filter((part) => parts.some((row) => row[part] > 0.0005)).map((part) => ({
    label: names[part][0], stroke: names[part][1], fill: names[part][1], width: 0, raw: parts.map((row) => row[part]),
    values: parts.map((row) => (row[0] == null ? null : row.slice(0, part + 1).reduce((sum, one) => sum + one, 0))),
  }));
}

// Heat maps of the lag by step: all of it, and its parts in flight and in the queue.
function Lag({ data, x, info, ...shared }) {
  const mean = data.mean["staleness/mean"] ?? [];
  const bound = String(info.mode).includes("async") ? info.bound : undefined;
  const whole = heatOf(data, x, "staleness/histogram/", BLUE), highest = Math.max(1, whole.highest, Number.isFinite(bound) ? bound : 0);
  const draw = (u) => {
    whole.draw(u);
    if (!Number.isFinite(bound)) return;
    const y = u.valToPos(bound + 0.5, "y", true), context = u.ctx;
    context.save();
    context.strokeStyle = colour("bad");
    context.setLineDash([5, 4]);
    context.beginPath();
    context.moveTo(u.bbox.left, y);
    context.lineTo(u.bbox.left + u.bbox.width, y);
    context.stroke();
    context.restore();
  };
  const series = [{ label: "mean lag", values: mean, stroke: ORANGE, width: whole.highest < 0 ? 2 : 1 }];
  if (some(data.mean["staleness/max"])) series.push({ label: "max", values: data.mean["staleness/max"], stroke: "transparent", width: 0 });
  const parts = [["in flight", "staleness/in_flight_histogram/", SKY], ["in the queue", "staleness/in_queue_histogram/", PINK]]
    .map(([name, prefix, fill]) => ({ name, ...heatOf(data, x, prefix, fill) })).filter((part) => part.highest >= 0);
  return html`<${Card} title="Lag" unit="steps" now=${number(last(mean))}
    note=${`Darker: more of the step's groups.${Number.isFinite(bound) ? ` Dashed: the bound, ${bound}.` : ""}`}>
    <${Chart} x=${x} series=${series} yRange=${() => [-0.5, highest + 0.7]} draw=${draw} ...${shared} height=${parts.length ? 120 : 190} />
    ${parts.length > 0 && html`<div class="halves">${parts.map((part) => html`<div key=${part.name}><span class="unit">gained ${part.name}</span>
      <${Chart} x=${x} series=${[{ label: part.name, values: mean, stroke: "transparent", width: 0 }]} yRange=${() => [-0.5, Math.max(1, part.highest) + 0.7]} draw=${part.draw} ...${shared} height=${72} legend=${false} /></div>`)}</div>`}<//>`;
}

// The map of the metrics `prefix`<lag>: `draw` fills a cell per lag and step, with the share of the step's groups as opacity.
function heatOf(data, x, prefix, fill) {
  const lags = Object.keys(data.mean).filter((name) => name.startsWith(prefix)).map((name) => Number(name.slice(prefix.length)));
  const totals = x.map((_, index) => lags.reduce((sum, lag) => sum + (data.mean[prefix + lag][index] ?? 0), 0));
  const draw = (u) => {
    const context = u.ctx;
    context.save();
    context.beginPath();
    context.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    context.clip();
    context.fillStyle = fill;
    const edge = (index) => u.valToPos(index < 0 ? x[0] - ((x[1] ?? x[0] + 1) - x[0]) / 2 : index >= x.length - 1 ? x.at(-1) + (x.at(-1) - (x.at(-2) ?? x.at(-1) - 1)) / 2 : (x[index] + x[index + 1]) / 2, "x", true);
    for (const lag of lags) {
      const counts = data.mean[prefix + lag];
      const top = u.valToPos(lag + 0.5, "y", true) + 1, bottom = u.valToPos(lag - 0.5, "y", true) - 1;
      for (let index = 0; index < x.length; index++) {
        const share = (counts[index] ?? 0) / (totals[index] || 1);
        if (share <= 0) continue;
        context.globalAlpha = 0.12 + 0.8 * share;
        const left = edge(index - 1), right = edge(index);
        context.fillRect(left, top, Math.max(1, right - left - (right - left > 6 ? 1 : 0)), bottom - top);
      }
    }
    context.restore();
  };
  return { highest: Math.max(-1, ...lags), draw };
}

function Throughput({ data, x, ...shared }) {
  const series = [
    { label: "sampled", values: data.mean["inference/tokens_per_second"] ?? [], stroke: BLUE },
    { label: "trained", values: data.mean["policy/tokens_per_second"] ?? [], stroke: ORANGE },
  ];
  return html`<${Card} title="Throughput" unit="tokens/s" now=${number(last(series[0].values))}><${Chart} x=${x} series=${series} yRange=${zeroBased} ...${shared} /><//>`;
}

function Lengths({ data, x, ...shared }) {
  const of = (suffix) => data.mean[`generate/response_tokens${suffix}`] ?? [];
  const series = [
    { label: "max", values: of("_max"), stroke: faint(BLUE, "66"), width: 1 },
    { label: "p90", values: of("_p90"), stroke: SKY },
    { label: "p50", values: of("_p50"), stroke: BLUE, width: 2 },
    { label: "mean", values: of(""), stroke: ORANGE, dash: [4, 3] },
  ].filter((one) => some(one.values));
  return html`<${Card} title="Response length" unit="tokens" now=${number(last(of("")))}><${Chart} x=${x} series=${series} yRange=${zeroBased} ...${shared} /><//>`;
}

function Latency({ data, x, ...shared }) {
  const series = [
    { label: "p99", values: data.mean["generate/latency_s_p99"] ?? [], stroke: SKY },
    { label: "p50", values: data.mean["generate/latency_s_p50"] ?? [], stroke: BLUE, width: 2 },
    { label: "step", values: data.mean["time/step"] ?? [], stroke: ORANGE, dash: [4, 3] },
  ].filter((one) => some(one.values));
  return html`<${Card} title="Latency of a group, and duration of a step" unit="s" now=${withUnit(last(data.mean["generate/latency_s_p50"]), "s")}><${Chart} x=${x} series=${series} unit="s" yRange=${zeroBased} ...${shared} /><//>`;
}

// Every metric of the run.
export function Metrics({ run, info, ticks }) {
  const [chosen, setAxis] = useStored("axis", "step");
  const [range, setRange] = useState(null);
  const [wanted, setWanted] = useState("");
  useTheme();
  const fits = info.metrics.filter((metric) => wanted.toLowerCase().split(/\s+/).every((word) => `${metric.name} ${metric.meaning}`.toLowerCase().includes(word)));
  const shown = fits.slice(0, 60);
  const { data, error } = useCurves(run, [TOKENS, ...shown.map((metric) => metric.name)], ticks.metrics);
  const axis = data && { elapsed: data.elapsed_s, tokens: data.mean[TOKENS] }[chosen] ? chosen : "step";
  const x = useMemo(() => (data ? axisOf(data, axis) : []), [data, axis]);
  return html`
    <div class="bar"><input type="search" placeholder="filter by name or meaning" value=${wanted} onInput=${(event) => setWanted(event.target.value)} />
      <span>${fits.length} of ${info.metrics.length} metrics${fits.length > shown.length ? `; the first ${shown.length} are drawn` : ""}</span></div>
    <${AxisChoice} axis=${axis} setAxis=${setAxis} data=${data} range=${range} setRange=${setRange} />
    ${error && html`<div class="error">${error}</div>`}
    <div class="grid small">${data && shown.map((metric) => html`<${MetricCard} key=${metric.name} metric=${metric} data=${data} x=${x} axis=${axis} range=${range} onRange=${setRange} />`)}</div>`;
}
