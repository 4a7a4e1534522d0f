// What the model says: the samples of a step, one of them as a conversation and token for token, and its prompt over the run.
import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { get, number, plain, seconds, Text, useAnswer, usePaced, versionColour } from "./util.js";

const COLUMNS = [
  ["group_index", "group", "n"], ["sample", "sample", "n"], ["reward", "reward", "n"], ["advantage", "advantage", "n"], ["tokens", "tokens", "n"],
  ["turns", "turns", "n"], ["lag", "lag", "n"], ["stop_reason", "end", ""], ["prompt", "prompt", "wrap"], ["response", "response", "wrap"],
];
const FACETS = [["stop_reason", "end"], ["lag", "lag"], ["data_source", "source"], ["chosen", "recorded as"], ["reward", "reward"]];
const MOST_VALUES = 6; // of a number that are listed one by one; more are put into four ranges of equal width
const SHOWN_TOKENS = 4000;
const MOST_STEPS = 400; // in the list of steps: a browser needs seconds for a hundred thousand

// Of many steps some over the whole run, and all of those around the chosen one.
function listed(steps, at) {
  if (steps.length <= MOST_STEPS) return steps;
  const every = Math.ceil((2 * steps.length) / MOST_STEPS);
  return steps.filter((_, index) => index % every === 0 || index === steps.length - 1 || Math.abs(index - at) < MOST_STEPS / 4);
}

export function Samples({ run, ticks, query }) {
  const phase = query.get("phase") ?? "train", step = Number(query.get("step") ?? 0), uid = query.get("uid");
  const group = query.get("group"), row = query.get("row");
  const [order, setOrder] = useState(["group_index", 1]), [wanted, setWanted] = useState(""), [facets, setFacets] = useState({});
  const go = (change) => {
    const next = new URLSearchParams(Object.entries({ phase, step: step || "", uid: uid ?? "", group: group ?? "", row: row ?? "", ...change }).filter(([, one]) => one !== "" && one !== null));
    location.hash = `#/run/${encodeURIComponent(run)}/samples?${next}`;
  };
  // A step that was chosen does not change; the newest one does.
  const newest = usePaced(ticks.samples, "samples");
  const { data, error } = useAnswer(() => get("samples", { run, phase, step }), `${run} ${phase} ${step}`, step ? "" : newest);
  const over = useAnswer(async () => (uid ? get("prompt", { run, uid }) : null), `${run} ${uid}`, "").data;
  if (error && !data) return html`<div class="error">${plain(error)}</div>`;
  if (!data) return html`<div class="empty">Reading samples …</div>`;
  if (!data.steps.length && data.phases.length < 2) return html`<div class="empty">No samples are recorded yet.</div>`;
  const all = uid ? over ?? [] : data.rows.filter((one) => !group || String(one.group_index) === group);
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
  const offered = FACETS.map(([key, label]) => ({ key, label, options: optionsOf(key, all) })).filter(({ options }) => options.length > 1);
  const chosenOptions = offered.map(({ key, options }) => options.find(({ name }) => name === facets[key])).filter(Boolean);
  const rows = all.filter((one) => chosenOptions.every((option) => option.fits(one)) && words.every((word) => `${one.prompt} ${one.response} ${one.stop_reason} ${one.uid} ${one.data_source ?? ""} ${one.chosen ?? ""}`.toLowerCase().includes(word)));
  const [by, sign] = order;
  const compare = (a, b) => (a[by] === b[by] ? 0 : a[by] === null || a[by] === undefined ? 1 : b[by] === null || b[by] === undefined ? -1 : (a[by] < b[by] ? -1 : 1) * sign);
  const sorted = [...rows].sort((a, b) => (uid ? a.step - b.step : 0) || compare(a, b));
  const chosen = row === null ? null : all.find((one) => String(one.row) === row && (!uid || (one.step === Number(query.get("of")) && one.phase === phase))) ?? null;
  const at = data.steps.indexOf(data.step);
  const columns = COLUMNS.filter(([key]) => all.some((one) => one[key] !== undefined && one[key] !== null));
  return html`
    <div class="bar">
      ${data.phases.length > 1 && html`<span class="choice">${data.phases.map((one) => html`<button aria-pressed=${one === phase && !uid} onClick=${() => go({ phase: one, step: "", uid: "", row: "", group: "" })}>${one === "train" ? "training" : "evaluation"}</button>`)}</span>`}
      ${!uid && html`<span class="choice">${phase === "train" ? "step" : "version"}
        <button disabled=${at <= 0} onClick=${() => go({ step: data.steps[at - 1], row: "", group: "" })}>◂</button>
        <select value=${data.step} onChange=${(event) => go({ step: event.target.value, row: "", group: "" })}>
          ${at < 0 && html`<option value=${data.step}>${data.step}</option>`}${listed(data.steps, at).map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select>
        <button disabled=${at < 0 || at >= data.steps.length - 1} onClick=${() => go({ step: data.steps[at + 1], row: "", group: "" })}>▸</button>
        ${step > 0 && html`<button onClick=${() => go({ step: "", row: "", group: "" })}>newest</button>`}</span>`}
      ${uid && html`<span>prompt <b><${Text}>${uid}<//></b> over the run <button onClick=${() => go({ uid: "", row: "" })}>✕</button></span>`}
      ${group && html`<span>group ${group} only <button onClick=${() => go({ group: "", row: "" })}>✕</button></span>`}
      ${offered.map(({ key, label, options }) => html`<label key=${key}>${label} <select data-facet=${key} value=${options.some(({ name }) => name === facets[key]) ? facets[key] : ""} onChange=${(event) => setFacets({ ...facets, [key]: event.target.value })}>
        <option value="">all</option>${options.map((option) => html`<option value=${option.name}>${option.name} (${all.filter(option.fits).length})</option>`)}</select></label>`)}
      <input type="search" placeholder="text, end, prompt" value=${wanted} onInput=${(event) => setWanted(event.target.value)} />
      <span>${rows.length} of ${all.length} responses</span>
    </div>
    ${chosen && html`<${Sample} key=${`${chosen.phase} ${chosen.step} ${chosen.row}`} run=${run} chosen=${chosen} siblings=${all.filter((one) => one.group_index === chosen.group_index && one.step === chosen.step)}
      open=${(one) => go({ row: one.row, of: one.step })} overRun=${() => go({ uid: chosen.uid, row: "", group: "", step: "" })} close=${() => go({ row: "" })} />`}
    ${group && !all.length && html`<p class="note">Group ${group} is not among the recorded samples of this step: some groups of each step are recorded (trainer.samples_per_step).</p>`}
    ${all.length > 0 && html`<div class="scroll"><table class="samples"><thead><tr>${uid && html`<th class="n">step</th>`}${columns.map(([key, label, kind]) => html`<th class=${kind === "n" ? "n" : ""}>
        <button class="plain" onClick=${() => setOrder([key, by === key ? -sign : key === "group_index" || kind === "" ? 1 : -1])}>${label}${by === key ? (sign > 0 ? " ▴" : " ▾") : ""}</button></th>`)}<th></th></tr></thead>
      <tbody>${sorted.map((one, index) => html`<tr key=${`${one.step} ${one.row}`} class=${`${one.row === undefined ? "" : "link"} ${one === chosen ? "chosen" : ""} ${index && by === "group_index" && sorted[index - 1].group_index !== one.group_index ? "next" : ""}`}
          onClick=${() => one.row !== undefined && go({ row: one.row, of: one.step, phase: one.phase ?? phase, ...(uid ? {} : { step: one.step }) })}>
        ${uid && html`<td class="n">${one.phase === "eval" ? "evaluation " : ""}${one.step}</td>`}
        ${columns.map(([key, , kind]) => html`<td class=${kind}>${key === "reward" ? html`<${Reward} value=${one.reward} all=${all} />` : kind === "wrap" ? html`<${Text} newlines>${one[key]}<//>` : kind === "n" ? number(one[key]) : plain(one[key])}</td>`)}
        <td class="was">${plain((one.chosen ?? "").split(",").filter((why) => why !== "first").join(", "))}</td></tr>`)}</tbody></table></div>`}`;
}

// The choices of a facet: a name, and which rows fit.
function optionsOf(key, all) {
  const values = key === "chosen" ? all.flatMap((one) => (one.chosen ?? "").split(",")) : all.map((one) => one[key]);
  const known = [...new Set(values)].filter((one) => one !== null && one !== undefined && one !== "").sort((a, b) => (a < b ? -1 : 1));
  if (typeof known[0] !== "number" || known.length <= MOST_VALUES) {
    return known.map((value) => ({ name: typeof value === "number" ? number(value) : plain(value), fits: (one) => (key === "chosen" ? (one.chosen ?? "").split(",").includes(value) : one[key] === value) }));
  }
  const [low, high] = [known[0], known.at(-1)], edge = (index) => low + ((high - low) * index) / 4;
  return [0, 1, 2, 3].map((index) => ({
    name: `${number(edge(index))} to ${number(edge(index + 1))}`,
    fits: (one) => typeof one[key] === "number" && one[key] >= edge(index) && (index === 3 ? one[key] <= high : one[key] < edge(index + 1)),
  }));
}

function Reward({ value, all }) {
  if (typeof value !== "number") return "–";
  const known = all.map((one) => one.reward).filter((one) => typeof one === "number");
  const low = Math.min(0, ...known), high = Math.max(...known);
  const text = Math.abs(value) < 100 ? value.toFixed(3) : number(value);
  return html`<span class="reward"><span class="track"><i style=${{ width: `${Math.round((100 * (value - low)) / (high - low || 1))}%` }}></i></span>${text}</span>`;
}

// One sequence -------------------------------------------------------------------------------------------------------

const MODES = {
  version: "version", behaviour_logprobs: "log-prob of the engine", difference: "log-prob of trainer − engine", weighted: "advantage × weight",
  loss_mask: "trained or not", token_rewards: "reward",
};

function Sample({ run, chosen, siblings, open, overRun, close }) {
  const [tab, setTab] = useState("tokens");
  const { data, error } = useAnswer(() => get("sample", { run, phase: chosen.phase, step: chosen.step, row: chosen.row }), `${run} ${chosen.phase} ${chosen.step} ${chosen.row}`, "");
  const box = useRef(null);
  useEffect(() => {
    box.current?.querySelector(".siblings [aria-pressed=true]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
    box.current?.scrollIntoView({ block: "nearest" });
  }, []);
  return html`<div class="card sample" ref=${box}>
    <h2>Group ${chosen.group_index}, sample ${chosen.sample}${chosen.sequence ? `, sequence ${chosen.sequence}` : ""}<span class="unit">${chosen.phase === "eval" ? "evaluation of version" : "step"} ${chosen.step}</span>
      <span class="now"><button onClick=${overRun}>this prompt over the run</button> <button aria-label="close" onClick=${close}>✕</button></span></h2>
    <div class="siblings">${siblings.map((one) => html`<button aria-pressed=${one.row === chosen.row} onClick=${() => open(one)} title=${plain(one.response)}>
      <b>${number(one.reward)}</b> <span>${number(one.tokens)} tokens, ${plain(one.stop_reason)}</span></button>`)}</div>
    ${error && html`<div class="error">${plain(error)}</div>`}
    ${data && html`
    <p class="note">reward ${number(data.reward)}${(data.reward_parts ?? []).length > 0 && html` (${data.reward_parts.map(([name, part], index) => html`${index > 0 && ", "}<${Text}>${name}<//> ${number(part)}`)})`} · lag ${data.lag} · versions ${data.oldest_version}${data.newest_version === data.oldest_version ? "" : `–${data.newest_version}`} · end: ${plain(data.stop_reason)} · generated in ${seconds(data.generation_s)}${data.chosen ? ` · recorded as ${plain(data.chosen)}` : ""} · prompt <${Text}>${data.uid}<//>${data.data_source ? html` of <${Text}>${data.data_source}<//>` : ""}</p>
    <div class="bar"><span class="choice"><button aria-pressed=${tab === "tokens"} onClick=${() => setTab("tokens")}>tokens</button>
      <button aria-pressed=${tab === "conversation"} onClick=${() => setTab("conversation")}>conversation</button>
      ${data.turns?.length > 0 && html`<button aria-pressed=${tab === "turns"} onClick=${() => setTab("turns")}>times</button>`}</span></div>
    ${tab === "tokens" ? html`<${Tokens} data=${data} />` : tab === "turns" && data.turns?.length ? html`<${Turns} turns=${data.turns} />` : html`<${Conversation} data=${data} />`}`}
  </div>`;
}

// Requests, environment calls and tools of the sample, from the record of the run.
function Turns({ turns }) {
  const told = (one) => one.kind === "tool" ? one.names.join(", ") : one.kind === "environment" ? `${one.call}${one.ok ? "" : ", failed"}`
    : [`${number(one.prompt_tokens)} prompt tokens`, one.first_s === null ? "" : `first token after ${seconds(one.first_s)}`, `${number(one.tokens.reduce((sum, [, count]) => sum + count, 0))} sampled`,
      `end: ${one.stop}`].filter(Boolean).join(", ");
  const versions = (one) => (one.tokens ?? []).map(([version], index) => `${index ? ` ▸ ${one.seams[index - 1] ?? ""} ▸ ` : ""}v${version}`).join("");
  return html`<div class="scroll"><table class="told"><thead><tr><th class="n">from</th><th class="n">took</th><th>what</th><th></th><th>policy versions</th></tr></thead><tbody>
    ${turns.map((one) => html`<tr><td class="n">${seconds(one.begin - turns[0].begin)}</td><td class="n">${seconds(one.took_s)}</td><td>${one.kind}</td><td class="wrap"><${Text}>${told(one)}<//></td><td>${versions(one)}</td></tr>`)}</tbody></table></div>`;
}

function Conversation({ data }) {
  const messages = data.messages ?? [];
  if (!messages.length) return html`<div class="message"><${Text} newlines>${data.prompt}<//></div><div class="message assistant"><${Text} newlines>${data.response}<//></div>`;
  return messages.map(({ role, content, tool_calls }) => html`<div class=${`message ${["assistant", "system", "tool", "user"].includes(role) ? role : ""}`}>
    <span class="role">${plain(role)}</span><${Text}>${content}<//>
    ${(tool_calls ?? []).map((call) => html`<pre class="call"><${Text}>${call}<//></pre>`)}</div>`);
}

// Background colours of tokens: on a scale from blue over nothing to orange, by the value over the largest one.
function scaled(values, symmetric) {
  const known = values.filter((one) => typeof one === "number" && Number.isFinite(one));
  const most = Math.max(1e-9, ...known.map(Math.abs));
  return values.map((one) => {
    if (typeof one !== "number" || !Number.isFinite(one) || one === 0) return "";
    const share = Math.round(Math.min(1, Math.abs(one) / most) * 70);
    return `color-mix(in srgb, ${symmetric && one > 0 ? "#e69f00" : "#0072b2"} ${share}%, transparent)`;
  });
}

function Tokens({ data }) {
  const [mode, setMode] = useState("version"), [at, setAt] = useState(null), [all, setAll] = useState(false);
  const ids = data.response_token_ids ?? [], pieces = data.response_pieces;
  const of = (name) => data[name] ?? null;
  const difference = useMemo(() => (of("trainer_logprobs") && of("behaviour_logprobs") ? ids.map((_, index) => (data.loss_mask?.[index] ? data.trainer_logprobs[index] - data.behaviour_logprobs[index] : null)) : null), [data]);
  const weighted = useMemo(() => (of("advantages") ? ids.map((_, index) => data.advantages[index] * (data.importance_weights?.[index] ?? 1)) : null), [data]);
  const there = { version: of("versions"), behaviour_logprobs: of("behaviour_logprobs"), difference, weighted, loss_mask: of("loss_mask"),
    token_rewards: of("token_rewards")?.some((one) => one) ? data.token_rewards : null };
  const backgrounds = useMemo(() => {
    if (mode === "version") return ids.map((_, index) => (data.sampled?.[index] === false ? "" : `color-mix(in srgb, ${versionColour(data.versions?.[index] ?? null)} 42%, transparent)`));
    if (mode === "loss_mask") return ids.map((_, index) => (data.loss_mask[index] ? "color-mix(in srgb, #009e73 35%, transparent)" : ""));
    return scaled(there[mode] ?? [], mode !== "behaviour_logprobs");
  }, [data, mode]);
  const seams = useMemo(() => {
    let last = null;
    return ids.map((_, index) => {
      if (data.sampled?.[index] === false) return false;
      const seam = last !== null && data.versions?.[index] !== last;
      last = data.versions?.[index] ?? null;
      return seam;
    });
  }, [data]);
  const shown = all ? ids : ids.slice(0, SHOWN_TOKENS);
  const versions = [...new Set((data.versions ?? []).filter((_, index) => data.sampled?.[index] !== false))];
  const point = (event) => { const index = event.target.closest("[data-i]")?.dataset.i; if (index !== undefined) setAt(Number(index)); };
  const piece = (index) => pieces?.[index] ?? `⟨${ids[index]}⟩`;
  return html`
    <div class="bar"><label>colour <select value=${mode} onChange=${(event) => setMode(event.target.value)}>${Object.entries(MODES).filter(([key]) => there[key]).map(([key, label]) => html`<option value=${key}>${label}</option>`)}</select></label>
      ${mode === "version" ? html`<span class="legend">${versions.map((version) => html`<span><i class="swatch" style=${{ background: versionColour(version) }}></i>v${version} </span>`)}</span>`
        : mode === "loss_mask" ? html`<span>green: trained</span>` : html`<span>${mode === "behaviour_logprobs" ? "darker: less likely" : "orange: positive, blue: negative"}</span>`}</div>
    <p class="facts mono">${at === null || at >= ids.length ? "Point at a token to see its numbers." : html`token ${at}: <b><${Text} newlines>${piece(at)}<//></b> id ${ids[at]}${data.sampled?.[at] === false ? " · not sampled"
      : html` · v${data.versions?.[at]} · log-prob ${number(of("behaviour_logprobs")?.[at])}${of("trainer_logprobs") && data.loss_mask?.[at] ? html` · trainer ${number(data.trainer_logprobs[at])} · ratio ${number(Math.exp(difference[at]))}` : ""}${
      of("reference_logprobs") ? ` · reference ${number(data.reference_logprobs[at])}` : ""}`}${of("advantages") ? ` · advantage ${number(data.advantages[at])}` : ""}${of("importance_weights") ? ` · weight ${number(data.importance_weights[at])}` : ""}${
      of("values") ? ` · value ${number(data.values[at])}` : ""}${data.token_rewards?.[at] ? ` · reward ${number(data.token_rewards[at])}` : ""}${of("loss_mask") ? (data.loss_mask[at] ? " · trained" : " · not trained") : ""}`}</p>
    <div class="tokens mono" onMouseOver=${point} onClick=${point}>
      <span class="given"><${Text} newlines>${data.prompt}<//></span>${shown.map((_, index) => html`<span data-i=${index} class=${`${data.sampled?.[index] === false ? "given" : ""} ${seams[index] ? "seam" : ""} ${at === index ? "at" : ""}`}
        style=${{ background: backgrounds[index] }}><${Text} newlines>${piece(index)}<//></span>`)}
    </div>
    ${shown.length < ids.length && html`<button onClick=${() => setAll(true)}>show all ${ids.length} tokens</button>`}
    ${!pieces && ids.length > 0 && html`<p class="note">This file has no texts of single tokens: ids are shown. The whole response: <${Text} newlines>${data.response}<//></p>`}`;
}
