// The picture of the timeline: one canvas with the trainer, the engines, and a lane per group in which each sample is a strip whose
// colour is the policy version that sampled it.
import { colour, duration, number, PALETTE, plain, seconds, versionColour, withUnit } from "./util.js";

const LEFT = 78, AXIS = 20, ROW = 18, ENGINE = 26, GAP = 3, MAX_ENGINES = 8;
const TRAINER = ["update_policy", "accumulate", "finish_update", "discard", "forward_logprobs", "reference_logprobs", "snapshot", "load", "export_hf",
  "offload_states", "reload_states", "wait_for_batch", "wait_for_evaluation", "wait_for_weight_sync"];
const ACTIVITY = {
  update_policy: "#5b6b86", accumulate: "#5b6b86", finish_update: "#3f4d66", forward_logprobs: "#8a94ab", reference_logprobs: "#8a94ab", gather: PALETTE[1],
  transfer: PALETTE[3], pause: "#b3261e", load_weights: "#7d1a14", snapshot: PALETTE[4], offload_states: PALETTE[4], reload_states: PALETTE[4],
};
export const ORDERS = {
  slot: "slots", begin: "beginning", lag: "lag", length: "duration", tokens: "tokens", reward: "reward",
};
const PARTS = ["requests", "environments", "tools", "agents"];
export const UNFINISHED = ["running", "generated", "buffered"];

// Lanes: each group gets the first one that is free when it begins. Groups that had a lane keep it, so that a picture that moves does not jump.
export function pack(groups, kept) {
  const ends = new Map(), lanes = new Map();
  const key = (group) => `${group.process}/${group.group}`;
  for (const group of groups) {
    const lane = kept.get(key(group));
    if (lane === undefined) continue;
    const busy = ends.get(lane) ?? [];
    if (busy.some(([begin, end]) => group.begin < end && begin < group.end)) continue;
    ends.set(lane, [...busy, [group.begin, group.end]]);
    lanes.set(key(group), lane);
  }
  for (const group of groups) {
    if (lanes.has(key(group))) continue;
    let lane = 0;
    while ((ends.get(lane) ?? []).some(([begin, end]) => group.begin < end && begin < group.end)) lane++;
    ends.set(lane, [...(ends.get(lane) ?? []), [group.begin, group.end]]);
    lanes.set(key(group), lane);
  }
  return lanes;
}

// Since when each look at an engine is taken to hold: since the one before, unless that is far away, as before a resume.
export function beginnings(points) {
  const apart = points.slice(1).map((point, index) => point[0] - points[index][0]).sort((a, b) => a - b);
  const usual = apart[apart.length >> 1] ?? 1;
  return points.map(([at], index) => (index && at - points[index - 1][0] <= 3 * usual ? points[index - 1][0] : at - usual));
}

export class Lanes {
  // `view`: {t0, t1} in Unix seconds. `onView(view)`: somebody moved it. `onPick(group | null)`, `onStep(step | null)`, `onHover(text, x, y)`.
  constructor(canvas, scroller, callbacks) {
    Object.assign(this, { canvas, scroller, callbacks, data: null, view: { t0: 0, t1: 1 }, kept: new Map(), order: "slot", strip: 0, picked: null, step: null });
    this.pointers = new Map();
    this.frame = 0;
    this.drawn = [];
    const on = (target, name, handler, options) => target.addEventListener(name, handler.bind(this), options);
    on(canvas, "wheel", this.wheel, { passive: false });
    on(canvas, "pointerdown", this.down);
    on(canvas, "pointermove", this.move);
    on(canvas, "pointerup", this.up);
    on(canvas, "pointercancel", this.up);
    on(canvas, "pointerleave", () => callbacks.onHover(null));
    on(canvas, "keydown", this.key);
    on(scroller, "scroll", this.draw);
    this.watcher = new ResizeObserver(() => this.draw());
    this.watcher.observe(scroller);
  }

  close() {
    this.watcher.disconnect();
    cancelAnimationFrame(this.frame);
  }

  show(data, view, { order, strip, picked, step }) {
    if (data !== this.data || order !== this.order || strip !== this.strip) {
      const changed = data !== this.data;
      Object.assign(this, { data, order, strip });
      if (changed) this.prepare();
      this.arrange();
    }
    Object.assign(this, { view, picked, step });
    this.draw();
  }

  prepare() {
    const rank = new Map();
    for (const group of this.data.groups) {
      group.samples = 1 + Math.max(0, ...PARTS.flatMap((part) => group[part].map((one) => one[0] ?? 0)));
      rank.set(`${group.process}/${group.group}`, group);
    }
    this.samples = Math.max(1, ...this.data.groups.map((group) => group.samples));
    this.engines = Object.entries(this.data.engines).slice(0, MAX_ENGINES).map(([name, points]) => [name, points, beginnings(points)]);
    this.mostRunning = Math.max(1, ...Object.values(this.data.engines).flat().map((point) => point[3] ?? 0));
    this.sync = this.data.spans.filter(([name]) => !TRAINER.includes(name));
    this.trainer = this.data.spans.filter(([name]) => TRAINER.includes(name));
  }

  arrange() {
    const groups = this.data.groups, key = (group) => `${group.process}/${group.group}`;
    if (this.order === "slot") {
      this.kept = pack(groups, this.kept);
      for (const group of groups) group.lane = this.kept.get(key(group));
    } else {
      const of = { begin: (group) => group.begin, lag: (group) => -(group.lag ?? -1), length: (group) => group.begin - group.end,
        tokens: (group) => -(group.tokens ?? 0), reward: (group) => -(group.reward ?? -Infinity) }[this.order];
      [...groups].sort((a, b) => of(a) - of(b) || a.group - b.group).forEach((group, index) => { group.lane = index; });
    }
    this.lanes = 1 + Math.max(-1, ...groups.map((group) => group.lane));
  }

  // Height of a lane. With strips of 0 px, all lanes fit into the window as far as they stay legible.
  get pitch() {
    const fit = (this.scroller.clientHeight - this.head - 8) / Math.max(1, this.lanes) - GAP;
    const height = this.strip ? this.samples * this.strip + 2 : Math.min(fit, this.samples * 8);
    return Math.max(this.strip ? 8 : 10, Math.floor(height)) + GAP;
  }

  get head() {
    return AXIS + 2 * ROW + (this.engines?.length ?? 0) * ENGINE + 8 + (this.data?.density ? 96 : 0);
  }

  get full() {
    return this.head + (this.lanes ?? 0) * this.pitch + 8;
  }

  x(time) {
    return LEFT + ((time - this.view.t0) / (this.view.t1 - this.view.t0)) * (this.width - LEFT - 6);
  }

  time(x) {
    return this.view.t0 + ((x - LEFT) / (this.width - LEFT - 6)) * (this.view.t1 - this.view.t0);
  }

  draw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (this.data) this.paint();
    });
  }

  paint() {
    const ratio = devicePixelRatio || 1, width = this.scroller.clientWidth, height = this.scroller.clientHeight;
    const canvas = this.canvas;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    Object.assign(this, { width, height });
    const c = (this.c = canvas.getContext("2d"));
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.ink = Object.fromEntries(["card", "ink", "soft", "line", "grid", "bad", "hover", "accent"].map((name) => [name, colour(name)]));
    c.fillStyle = this.ink.card;
    c.fillRect(0, 0, width, height);
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    this.drawn = [];
    // Lanes first: what stays at the top is drawn over them.
    c.save();
    c.beginPath();
    c.rect(LEFT, this.head, width - LEFT - 6, height - this.head);
    c.clip();
    this.paintSteps(this.head, height);
    for (const group of this.data.groups) this.paintGroup(group);
    c.restore();
    this.paintLabels();
    this.paintHead();
  }

  label(text, y) {
    this.c.fillStyle = this.ink.soft;
    this.c.textAlign = "left";
    this.c.fillText(text, 4, y);
  }

  paintLabels() {
    const { c } = this;
    c.fillStyle = this.ink.card;
    c.fillRect(0, this.head, LEFT - 2, this.height);
    if (this.pitch < 11) return;
    for (let lane = 0; lane < this.lanes; lane++) {
      const y = this.laneTop(lane) + this.pitch / 2 - GAP / 2;
      if (y > this.head && y < this.height) this.label(this.order === "slot" ? `slot ${lane + 1}` : `${lane + 1}.`, y);
    }
  }

  laneTop(lane) {
    return this.head + lane * this.pitch - this.scroller.scrollTop;
  }

  paintSteps(top, bottom) {
    const { c } = this;
    c.strokeStyle = this.ink.line;
    c.lineWidth = 1;
    c.beginPath();
    for (const [, at] of this.data.steps) {
      const x = Math.round(this.x(at)) + 0.5;
      c.moveTo(x, top);
      c.lineTo(x, bottom);
    }
    c.stroke();
  }

  paintHead() {
    const { c, width } = this, right = width - 6;
    c.fillStyle = this.ink.card;
    c.fillRect(0, 0, width, this.head);
    // Time since the record began
    const span = this.view.t1 - this.view.t0, most = Math.max(2, Math.floor((right - LEFT) / 90));
    const unit = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 604800]
      .find((one) => span / one <= most) ?? 2592000;
    c.textAlign = "center";
    c.fillStyle = this.ink.soft;
    c.strokeStyle = this.ink.grid;
    const digits = unit < 1 ? Math.ceil(-Math.log10(unit)) : 0;
    for (let at = Math.ceil((this.view.t0 - this.data.first) / unit) * unit; at <= this.view.t1 - this.data.first; at += unit) {
      const x = this.x(this.data.first + at);
      const text = digits ? `${at.toFixed(digits)} s` : duration(at);
      if (x > LEFT + 20 && x < right - 20) c.fillText(text, x, AXIS / 2);
    }
    this.label("time", AXIS / 2);
    c.save();
    c.beginPath();
    c.rect(LEFT, AXIS - 5, right - LEFT, this.head);
    c.clip();
    this.paintSteps(AXIS, this.head);
    this.paintActivities(this.trainer, AXIS);
    this.paintActivities(this.sync, AXIS + ROW);
    this.paintCheckpoints(AXIS + 2);
    this.engines.forEach(([, points, begins], index) => this.paintEngine(points, begins, AXIS + 2 * ROW + 4 + index * ENGINE));
    if (this.data.density) this.paintDensity(this.head - 96);
    if (this.data.known_from > this.view.t0) {
      c.fillStyle = this.ink.soft;
      c.textAlign = "right";
      c.fillText("zoom in to see more ▸", this.x(this.data.known_from) - 6, AXIS + ROW / 2);
    }
    c.restore();
    this.label("trainer", AXIS + ROW / 2);
    this.label("weight sync", AXIS + 1.5 * ROW);
    this.engines.forEach(([name], index) => this.label(`engine ${name}`, AXIS + 2 * ROW + 4 + index * ENGINE + ENGINE / 2 - 2));
    if (this.data.density) this.label("sampling", this.head - 48);
    c.fillStyle = this.ink.line;
    c.fillRect(0, this.head - 3, width, 1);
  }

  paintActivities(spans, top) {
    const { c } = this;
    for (const [name, step, t0, t1] of spans) {
      const left = this.x(t0), right = this.x(t1);
      if (right < LEFT || left > this.width) continue;
      const wait = name.startsWith("wait");
      c.globalAlpha = this.step !== null && step !== this.step ? 0.35 : 1;
      if (wait) {
        c.strokeStyle = this.ink.soft;
        c.strokeRect(left + 0.5, top + 3.5, Math.max(0, right - left - 1), ROW - 8);
      } else {
        c.fillStyle = ACTIVITY[name] ?? "#8a94ab";
        c.fillRect(left, top + 2, Math.max(1, right - left - 0.5), ROW - 4);
      }
      const text = (name === "update_policy" || name === "finish_update") && step !== null ? `step ${step}` : name.replaceAll("_", " ");
      if (right - left > 40 && c.measureText(text).width < right - left - 6) {
        c.fillStyle = wait ? this.ink.soft : "#fff";
        c.textAlign = "left";
        c.fillText(text, Math.max(left, LEFT) + 4, top + ROW / 2 + 0.5);
      }
      c.globalAlpha = 1;
      this.drawn.push({ left, right, top, bottom: top + ROW, span: [name, step, t0, t1] });
    }
  }

  // Above the trainer, which goes on meanwhile
  paintCheckpoints(bottom) {
    const { c } = this;
    for (const [step, t0, t1, ok] of this.data.checkpoints ?? []) {
      const left = this.x(t0), right = Math.max(this.x(t1), left + 1);
      c.fillStyle = ok ? PALETTE[3] : this.ink.bad;
      c.fillRect(left, bottom - 2, right - left, 2);
      c.beginPath();
      c.moveTo(right - 4, bottom);
      c.lineTo(right, bottom - 7);
      c.lineTo(right + 4, bottom);
      c.fill();
      this.drawn.push({ left: left - 4, right: right + 4, top: bottom - 7, bottom, checkpoint: [step, t1 - t0, ok] });
    }
  }

  paintEngine(points, begins, top) {
    const { c } = this, bottom = top + ENGINE - 6;
    points.forEach(([at, state, version, running, , paused], index) => {
      const left = this.x(begins[index]), right = this.x(at);
      if (right < LEFT || left > this.width) return;
      const height = (bottom - top - 5) * ((running ?? 0) / this.mostRunning);
      c.fillStyle = state === "healthy" ? versionColour(version) : state === "dead" ? this.ink.bad : "#999";
      c.fillRect(left, bottom - 3, right - left + 0.5, 3);
      c.globalAlpha = paused ? 0.2 : 0.45;
      c.fillRect(left, bottom - 4 - height, right - left + 0.5, height);
      c.globalAlpha = 1;
      this.drawn.push({ left, right, top, bottom, point: points[index] });
    });
  }

  paintDensity(top) {
    const { c } = this, { running, t0, t1 } = this.data.density, height = 84;
    const versions = Object.keys(running).map(Number).sort((a, b) => a - b);
    const bins = running[versions[0]]?.length ?? 0, sums = Array(bins).fill(0);
    const most = Math.max(1, ...Array.from({ length: bins }, (_, bin) => versions.reduce((sum, one) => sum + running[one][bin], 0)));
    for (const version of versions) {
      c.fillStyle = versionColour(version);
      running[version].forEach((count, bin) => {
        if (count <= 0) return;
        const left = this.x(t0 + ((t1 - t0) * bin) / bins), right = this.x(t0 + ((t1 - t0) * (bin + 1)) / bins);
        const bottom = top + height - (sums[bin] / most) * height;
        c.fillRect(left, bottom - (count / most) * height, right - left + 0.5, (count / most) * height);
        sums[bin] += count;
      });
    }
    c.fillStyle = this.ink.soft;
    c.textAlign = "right";
    c.fillText(`${number(most)} responses`, this.width - 10, top + 6);
  }

  paintGroup(group) {
    const top = this.laneTop(group.lane), height = this.pitch - GAP, { c } = this;
    const left = this.x(group.begin), right = Math.max(this.x(group.end), left + 1);
    if (top > this.height || top + height < this.head || right < LEFT || left > this.width) return;
    const faded = (this.step !== null && group.step !== this.step) || (this.picked && this.picked !== group);
    c.globalAlpha = faded ? 0.25 : 1;
    // The whole life; what follows generation waits, pale.
    const generated = group.finished ?? group.end;
    c.fillStyle = this.ink.hover;
    c.fillRect(left, top, right - left, height);
    if (group.finished && group.end > generated) {
      c.fillStyle = versionColour(group.oldest);
      c.globalAlpha *= 0.14;
      c.fillRect(this.x(generated), top, right - this.x(generated), height);
      c.globalAlpha = faded ? 0.25 : 1;
    }
    if (!group.requests.length) {
      c.strokeStyle = this.ink.soft;
      c.setLineDash([1, 4]);
      c.beginPath();
      c.moveTo(left + 3, top + height / 2);
      c.lineTo(Math.max(left + 3, this.x(generated) - 2), top + height / 2);
      c.stroke();
      c.setLineDash([]);
    }
    const strip = Math.max(1, (height - 2) / group.samples), thick = Math.max(1, strip > 2.5 ? strip - 1 : strip);
    c.fillStyle = this.ink.soft;
    c.globalAlpha *= 0.4;
    for (const [sample, t0, t1] of group.agents) {
      c.fillRect(this.x(t0), top + 1 + (sample ?? 0) * strip + thick / 2 - 0.5, this.x(t1) - this.x(t0), 1);
    }
    c.globalAlpha = faded ? 0.25 : 1;
    for (const [sample, submitted, , , stop, , segments] of group.requests) {
      const y = top + 1 + (sample ?? 0) * strip;
      const first = segments.length ? segments[0][2] : null;
      if (first !== null && this.x(first) - this.x(submitted) > 1.5) {
        c.fillStyle = this.ink.soft;
        c.fillRect(this.x(submitted), y + thick / 2 - 0.5, this.x(first) - this.x(submitted), 1);
      }
      for (const [version, , t0, t1] of segments) {
        const from = this.x(t0);
        c.fillStyle = versionColour(version);
        c.fillRect(from, y, Math.max(0.8, this.x(t1) - from), thick);
      }
      if (stop === "error" || stop === "cancelled") {
        const end = segments.length ? this.x(segments.at(-1)[3]) : this.x(submitted);
        c.fillStyle = this.ink.bad;
        c.fillRect(end - 1, y, 3, thick);
      }
    }
    const calls = [...group.environments.map(([sample, t0, t1, , ok]) => [sample, t0, t1, ok ? "#8a94ab" : this.ink.bad, 4]),
      ...group.tools.map(([sample, t0, t1]) => [sample, t0, t1, this.ink.ink, 3])];
    for (const [sample, t0, t1, fill, apart] of calls) {
      const from = this.x(t0), end = Math.min(this.width, this.x(t1));
      if (end - from < 1 && fill !== this.ink.bad) continue;
      const y = top + 1 + (sample ?? 0) * strip + thick * 0.2;
      c.fillStyle = fill;
      // Of a long one that began on the left of the picture, only what is seen.
      const first = from < LEFT ? LEFT - ((LEFT - from) % apart) : from;
      for (let x = first; x < Math.max(end, from + 0.5); x += apart) c.fillRect(x, y, Math.min(apart / 2, Math.max(0.5, end - x)), Math.max(1, thick * 0.6));
    }
    for (const [, t0, t1, ok] of group.stages) {
      c.fillStyle = ok ? this.ink.soft : this.ink.bad;
      c.fillRect(this.x(t0), top + height / 2 - 1, Math.max(1, this.x(t1) - this.x(t0)), 2);
    }
    if (group.restored || group.replayed) c.setLineDash([3, 3]);
    c.strokeStyle = this.picked === group ? this.ink.ink : group.state === "failed" ? this.ink.bad : this.ink.line;
    c.lineWidth = this.picked === group ? 2 : 1;
    c.strokeRect(left + 0.5, top + 0.5, Math.max(1, right - left - 1), height - 1);
    c.setLineDash([]);
    c.lineWidth = 1;
    for (const [at] of group.retries) this.mark("✗", this.x(at), top + height / 2, this.ink.bad);
    this.captions(group, top + height / 2, left, right, this.x(generated));
    c.globalAlpha = 1;
    this.drawn.push({ left, right, top, bottom: top + height, group });
  }

  mark(text, x, y, fill) {
    this.c.fillStyle = fill;
    this.c.textAlign = "center";
    this.c.fillText(text, x, y);
  }

  // At the end: which step trained it, or why none did. It stands in the time in which the group waited.
  captions(group, y, left, right, generated) {
    const { c } = this;
    const end = group.state === "trained" ? `▼ ${group.step}${group.lag ? ` lag ${group.lag}` : ""}`
      : UNFINISHED.includes(group.state) ? "" : `✕ ${group.state}`;
    if (this.pitch < 12) return;
    const width = end ? c.measureText(end).width : 0;
    const room = right - Math.max(generated, left, LEFT);
    if (end && room > width + 6) {
      c.fillStyle = group.state === "failed" ? this.ink.bad : this.ink.soft;
      c.textAlign = "right";
      c.fillText(end, right - 4, y);
      const name = `#${group.group}`;
      if (room > width + c.measureText(name).width + 16) {
        c.textAlign = "left";
        c.fillText(name, Math.max(generated, LEFT) + 4, y);
      }
    }
  }

  // Pointers --------------------------------------------------------------------------------------------------------

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  found(x, y) {
    const inside = this.drawn.filter((one) => x >= one.left - 1 && x <= one.right + 1 && y >= one.top && y <= one.bottom && (one.group ? y > this.head : y <= this.head));
    return inside.at(-1) ?? null;
  }

  zoom(factor, x) {
    const centre = this.time(x), { t0, t1 } = this.view;
    const length = Math.min(Math.max((t1 - t0) * factor, 0.01), Math.max(60, (this.data.last - this.data.first) * 1.5));
    const share = (centre - t0) / (t1 - t0);
    this.callbacks.onView({ t0: centre - length * share, t1: centre + length * (1 - share) });
  }

  pan(share) {
    const move = (this.view.t1 - this.view.t0) * share;
    this.callbacks.onView({ t0: this.view.t0 + move, t1: this.view.t1 + move });
  }

  wheel(event) {
    const [x] = this.at(event);
    // Over the names, and with shift, the wheel scrolls.
    if (!this.data || x < LEFT || event.shiftKey) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / this.width);
    else this.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.004), x);
  }

  down(event) {
    this.pointers.set(event.pointerId, this.at(event));
    this.moved = false;
    this.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    const before = this.pointers.get(event.pointerId), now = this.at(event);
    if (!before) {
      const one = this.data && this.found(...now);
      this.callbacks.onHover(one ? this.told(one) : null, ...now);
      return;
    }
    const [x, y] = now;
    if (this.pointers.size === 2) {
      const [other] = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
      const was = Math.abs(before[0] - other[0]), is = Math.abs(x - other[0]);
      if (was > 10 && is > 10) this.zoom(was / is, (x + other[0]) / 2);
      this.moved = true;
    } else if (this.moved || Math.abs(x - before[0]) + Math.abs(y - before[1]) > 3) {
      this.moved = true;
      if (event.pointerType === "mouse") this.scroller.scrollTop -= y - before[1];
      this.pan((before[0] - x) / (this.width - LEFT - 6));
    } else return;
    this.pointers.set(event.pointerId, now);
    this.callbacks.onHover(null);
  }

  up(event) {
    const was = this.pointers.delete(event.pointerId);
    if (!was || this.moved || event.type === "pointercancel") return;
    const one = this.found(...this.at(event));
    if (one?.span) this.callbacks.onStep(one.span[1]);
    else this.callbacks.onPick(one?.group ?? null);
  }

  key(event) {
    const acts = {
      ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.zoom(0.7, (this.width + LEFT) / 2),
      "=": () => this.zoom(0.7, (this.width + LEFT) / 2), "-": () => this.zoom(1 / 0.7, (this.width + LEFT) / 2), Escape: () => this.callbacks.onPick(null),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }

  told(one) {
    if (one.span) return [`${one.span[0].replaceAll("_", " ")}, ${one.span[1] === null ? "" : `step ${one.span[1]}, `}${seconds(one.span[3] - one.span[2])}`];
    if (one.point) {
      const [, state, version, running, waiting, paused, speed, cache] = one.point;
      return [`${plain(state)}${paused ? ", paused" : ""}, version ${version ?? "unknown"}`, `${number(running)} running, ${number(waiting)} waiting`,
        [speed === null ? "" : `${number(speed)} tokens/s`, cache === null ? "" : `KV cache ${withUnit(cache, "share")}`].filter(Boolean).join(", ")];
    }
    if (one.checkpoint) {
      const [step, took, ok] = one.checkpoint;
      return [`checkpoint of step ${step}${ok ? "" : " failed"}, ${seconds(took)}`];
    }
    const group = one.group;
    return [
      `group ${group.group}: ${group.state}${group.step ? ` in step ${group.step}, lag ${group.lag}` : ""}`,
      `${seconds((group.finished ?? group.end) - group.begin)} generating${group.finished ? `, ${seconds(group.end - group.finished)} waiting` : ""}`,
      `${group.oldest === undefined ? "" : `versions ${group.oldest}–${group.newest}, `}${group.tokens === undefined ? "" : `${number(group.tokens)} tokens`}${
        group.reward === undefined || group.reward === null ? "" : `, reward ${number(group.reward)}`}`,
      ...(group.tools.length ? [`tools: ${seconds(group.tools.reduce((sum, [, t0, t1]) => sum + t1 - t0, 0))} in ${number(group.tools.length)} turns`] : []),
    ];
  }
}
