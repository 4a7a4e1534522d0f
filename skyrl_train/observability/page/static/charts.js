// Curves: uPlot in a card, and the columns that they show.
import { html, useEffect, useLayoutEffect, useRef } from "./vendor/preact.js";
import { bytes, colour, duration, get, number, seconds, tick, useAnswer, useTheme, withUnit } from "./util.js";

const uPlot = window.uPlot;

// Columns ------------------------------------------------------------------------------------------------------------

// The metrics `names` of a run, as {step, time, elapsed_s, mean, min, max}; only new points are loaded when `tick` changes.
export function useCurves(run, names, tick) {
  const kept = useRef(null);
  const key = `${run} ${names.join(" ")}`;
  const load = async () => {
    const old = kept.current?.key === key ? kept.current.data : null;
    const since = old ? Math.max(0, old.step.length - 1) : 0;
    let data = await get("metrics", { run, name: names, since, every: old?.every ?? 0 });
    if (data.since && data.epoch !== old.epoch) data = await get("metrics", { run, name: names });
    data = data.since ? joined(old, data) : { ...data, step: data.step ?? [] };
    kept.current = { key, data };
    return data;
  };
  return useAnswer(load, key, tick);
}

function joined(old, fresh) {
  const join = (a, b) => [...(a ?? Array(fresh.since).fill(null)).slice(0, fresh.since), ...(b ?? [])];
  const all = (part) => Object.fromEntries(
    [...new Set([...Object.keys(old[part]), ...Object.keys(fresh[part])])].map((name) => [
      name, join(old[part][name], fresh[part][name] ?? Array(fresh.step.length).fill(null)),
    ]),
  );
  const times = Object.fromEntries(["step", "time", "elapsed_s"].map((name) => [name, fresh[name] && join(old[name], fresh[name])]));
  return { ...fresh, ...times, mean: all("mean"), min: all("min"), max: all("max") };
}

export const AXES = { step: "step", elapsed: "time of training", tokens: "sampled tokens" };
export const TOKENS = "inference/generated_tokens_total";

// The values of the x axis; they must increase.
export function axisOf(data, axis) {
  const chosen = { elapsed: data.elapsed_s, tokens: data.mean[TOKENS] }[axis] ?? data.step;
  let last = -Infinity;
  return chosen.map((one) => (last = one === null || one <= last ? last + 1e-9 : one));
}

// Drawing ------------------------------------------------------------------------------------------------------------

const UNITS = {
  share: (at) => `${tick(at * 100)}%`,
  s: (at) => (at === 0 ? "0" : Math.abs(at) < 1 ? `${tick(at * 1e3)} ms` : Math.abs(at) < 100 ? `${tick(at)} s` : seconds(at)),
  bytes,
};

// A chart of `series` over `x`: {label, values, stroke, fill, width, dash, show, points, unit, raw}. `bands`: pairs of indices of series between
// which is filled. `draw(u)`: draws more. `range`: the x values that are shown; null: all. `onRange`: somebody has chosen others.
export function Chart({ x, series, bands = [], unit = "", axis = "step", height = 190, range = null, onRange, yRange, draw, legend = true, group }) {
  const box = useRef(null), plot = useRef(null), theme = useTheme();
  const shape = JSON.stringify([
    theme, unit, axis, height, legend, bands,
    series.map(({ label, stroke, fill, width, dash, points }) => [label, stroke, fill, width, dash, !!points]),
  ]);
  const data = [x, ...series.map((one) => one.values)];
  const latest = useRef({});
  Object.assign(latest.current, { series, draw, onRange, x, range });
  useLayoutEffect(() => {
    const soft = colour("soft"), grid = colour("grid");
    const axisStyle = { stroke: soft, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const options = {
      width: Math.max(120, box.current.clientWidth), height, legend: { show: legend }, padding: [8, 10, 0, 0],
      cursor: { sync: group ? { key: group, setSeries: false, scales: ["x", null] } : undefined, points: { size: 6 }, drag: { x: true, y: false, setScale: false } },
      scales: { x: { time: false, range: (u, low, high) => latest.current.range ?? [low, high === low ? low + 1 : high] }, y: { range: yRange ?? within } },
      axes: [
        { ...axisStyle, size: 24, gap: 2, values: (u, ticks) => ticks.map(axis === "elapsed" ? duration : tick) },
        { ...axisStyle, size: 50, gap: 4, space: height < 100 ? 16 : 30, values: (u, ticks) => ticks.map(UNITS[unit] ?? tick) },
      ],
      series: [
        { label: axis === "elapsed" ? "time" : axis, value: (u, at) => (axis === "elapsed" ? duration : plainNumber)(at ?? latest.current.x.at(-1)) },
        ...series.map((one, index) => ({
          label: one.label, stroke: one.stroke, fill: one.fill, width: one.width ?? 1.5, dash: one.dash, spanGaps: !one.points,
          points: { show: !!one.points, size: 6, fill: one.stroke },
          paths: one.points ? () => null : undefined,
          value: (u, at, of, index_) => {
            const current = latest.current.series[index];
            const shown = index_ === null || index_ === undefined ? lastOf(current.raw ?? current.values) : (current.raw ?? current.values)[index_];
            return withUnit(shown, current.unit ?? unit);
          },
        })),
      ],
      bands: bands.map(([high, low, fill]) => ({ series: [high, low], fill })),
      hooks: {
        draw: [(u) => latest.current.draw?.(u)],
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          const chosen = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          latest.current.onRange?.(chosen);
        }],
      },
    };
    const made = new uPlot(options, data, box.current);
    plot.current = made;
    const reset = () => latest.current.onRange?.(null);
    made.over.addEventListener("dblclick", reset);
    const watcher = new ResizeObserver(() => {
      if (box.current && Math.abs(box.current.clientWidth - made.width) > 1) made.setSize({ width: Math.max(120, box.current.clientWidth), height });
    });
    watcher.observe(box.current);
    return () => {
      watcher.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => { plot.current?.setData(data); }, [x, range, ...series.map((one) => one.values)]);
  return html`<div class="chart" ref=${box}></div>`;
}

const plainNumber = (at) => (at >= 1e6 ? number(at, 4) : String(Math.round(at)));
const lastOf = (values) => values.findLast((one) => one !== null && one !== undefined);

function within(u, low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(low * 0.9, low * 1.1), Math.max(low * 0.9, low * 1.1)];
  const margin = (high - low) * 0.06;
  return [low >= 0 && low - margin < 0 ? 0 : low - margin, high + margin];
}

// From 0, or from the lowest value if it is negative.
export const zeroBased = (u, low, high) => [low < 0 ? low * 1.06 : 0, high > 0 ? high * 1.06 : low < 0 ? 0 : 1];
export const sharesOf = () => [0, 1];

// A card with the curve of one metric; with several rows per point, the band of their extremes.
export function MetricCard({ metric, data, x, axis, range, onRange, height = 110, title, stroke }) {
  const mean = data.mean[metric.name] ?? [];
  const low = data.min[metric.name], high = data.max[metric.name];
  const line = stroke ?? colour("accent");
  const series = [{ label: "mean", values: mean, stroke: line }];
  const bands = low ? [[2, 3, faint(line)]] : [];
  if (low) series.push({ label: "max", values: high, stroke: faint(line), width: 0.5 }, { label: "min", values: low, stroke: faint(line), width: 0.5 });
  return html`<div class="card" title=${metric.meaning}>
    <h2>${title ?? metric.name}<span class="unit">${metric.unit}</span><span class="now">${withUnit(lastOf(mean), metric.unit)}</span></h2>
    <${Chart} x=${x} series=${series} bands=${bands} unit=${metric.unit} axis=${axis} range=${range} onRange=${onRange} height=${height}
      legend=${false} group="run" />
  </div>`;
}

export const faint = (hex, alpha = "33") => (/^#[0-9a-f]{6}$/i.test(hex) ? hex + alpha : hex);

export function Spark({ points }) {
  const known = points.filter(([, one]) => typeof one === "number" && Number.isFinite(one));
  if (known.length < 2) return html`<svg class="spark"></svg>`;
  const [xs, ys] = [known.map((one) => one[0]), known.map((one) => one[1])];
  const [left, right, low, high] = [xs[0], xs.at(-1), Math.min(...ys), Math.max(...ys)];
  const at = ([a, b]) => `${(((a - left) / (right - left || 1)) * 100).toFixed(1)} ${(19 - ((b - low) / (high - low || 1)) * 16).toFixed(1)}`;
  return html`<svg class="spark" viewBox="0 0 100 22" preserveAspectRatio="none" aria-hidden="true"><path d=${"M" + known.map(at).join("L")} /></svg>`;
}
