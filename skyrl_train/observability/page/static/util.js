// Formats, requests and the live stream that all views share.
import { html, useEffect, useRef, useState } from "./vendor/preact.js";

// Numbers ------------------------------------------------------------------------------------------------------------

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e13 || size < 1e-4)) return value.toExponential(digits - 1);
  for (const [limit, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return shorten(value / (limit === 1e4 ? 1e3 : limit), digits) + suffix;
  }
  return Number.isInteger(value) ? String(value) : shorten(value, digits);
}

// `digits` significant digits, without an exponent.
function shorten(value, digits) {
  return value.toFixed(Math.min(12, Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value) || 1)))));
}

// The same for the ticks of an axis, without zeros at the end.
export const tick = (value) => number(value).replace(/(\.\d*?)0+(?=\D*$)/, "$1").replace(/\.(?=\D*$)/, "");

export function withUnit(value, unit) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (unit === "share") return `${number(value * 100)} %`;
  if (unit === "s") return seconds(value);
  if (unit === "bytes") return bytes(value);
  return number(value);
}

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Math.abs(value) < 1e-3 && value !== 0) return `${number(value * 1e6)} µs`;
  if (Math.abs(value) < 1 && value !== 0) return `${number(value * 1e3)} ms`;
  return Math.abs(value) < 100 ? `${number(value)} s` : duration(value);
}

export function duration(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const all = Math.round(value), two = (part) => String(part).padStart(2, "0");
  const [days, hours, minutes] = [Math.floor(all / 86400), Math.floor(all / 3600) % 24, Math.floor(all / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours}:${two(minutes)}:${two(all % 60)}` : `${minutes}:${two(all % 60)}`;
}

export function bytes(value) {
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.abs(value) || 1) / 10)));
  return `${number(value / 2 ** (10 * power))} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

export function moment(unix) {
  if (!unix) return "–";
  const date = new Date(unix * 1000), two = (part) => String(part).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

export function ago(unix) {
  const past = Date.now() / 1000 - unix;
  if (!unix) return "never";
  if (past < 90) return `${Math.max(0, Math.round(past))} s ago`;
  if (past < 5400) return `${Math.round(past / 60)} min ago`;
  return past < 172800 ? `${Math.round(past / 3600)} h ago` : `${Math.round(past / 86400)} days ago`;
}

// Text ---------------------------------------------------------------------------------------------------------------

// Characters that are invisible, or that move the text around them: C0 and C1 controls, directions, zero widths, lone halves of pairs.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]|[\t\n]/g;

function drawn(character) {
  const code = character.charCodeAt(0);
  if (character === "\n") return "↵\n";
  if (character === "\t") return "⇥\t";
  if (code < 32) return String.fromCharCode(0x2400 + code);
  return code === 127 ? "␡" : `‹U+${code.toString(16).toUpperCase().padStart(4, "0")}›`;
}

// A text in which hidden characters are drawn. `newlines`: mark them too.
export function Text({ children, newlines = false }) {
  const text = String(children ?? ""), parts = [];
  let end = 0;
  for (const found of text.matchAll(HIDDEN)) {
    if (!newlines && (found[0] === "\n" || found[0] === "\t")) continue;
    parts.push(text.slice(end, found.index), html`<span class="ctl">${drawn(found[0])}</span>`);
    end = found.index + found[0].length;
  }
  return html`<span class="text">${parts}${text.slice(end)}</span>`;
}

// The same as one string, for titles and canvases.
export const plain = (text) => String(text ?? "").replace(HIDDEN, (character) => drawn(character).trim());

export const value = (any) => (typeof any === "string" ? any : JSON.stringify(any));

// Requests -----------------------------------------------------------------------------------------------------------

export function address(path, parameters) {
  const query = new URLSearchParams();
  for (const [key, one] of Object.entries(parameters)) {
    for (const each of Array.isArray(one) ? one : [one]) if (each !== undefined && each !== null) query.append(key, each);
  }
  return `api/${path}?${query}`;
}

// The answers that a file without a server contains, by path, run and axis.
const inlined = document.getElementById("answers");
const answers = inlined && JSON.parse(inlined.textContent);

// Milliseconds of the server's processor for the last answer, by path.
const costs = {};
const PACE = 100; // parsing new events and compression cost the server nearly twice as much again

export async function get(path, parameters = {}) {
  if (answers) return answers[[path, parameters.run, parameters.axis].filter((one) => typeof one === "string").join(" ")];
  const response = await fetch(address(path, parameters));
  costs[path] = Number(/dur=([\d.]+)/.exec(response.headers.get("server-timing"))?.[1] ?? 0);
  const body = await response.json().catch(() => ({ error: response.status === 401 ? "The page was started again. Open the address with its token, as the command printed it." : undefined }));
  if (!response.ok) throw new Error(body.error ?? `The page's server answered ${response.status}.`);
  return body;
}

// The answer of `load`, loaded again when `key` or `tick` changes; never twice at the same time. While it is loading again, and
// after an error, the last answer of the same key stays.
export function useAnswer(load, key, tick = 0) {
  const [answer, setAnswer] = useState({ key: null, data: null, error: null });
  const state = useRef({ busy: false, again: false, load, key });
  Object.assign(state.current, { load, key });
  useEffect(() => {
    const now = state.current;
    let gone = false;
    async function run() {
      if (now.busy) return void (now.again = true);
      now.busy = true;
      const of = now.key;
      try {
        const data = await now.load();
        if (of === now.key && !gone) setAnswer({ key: of, data, error: null });
      } catch (error) {
        if (of === now.key && !gone) setAnswer((old) => ({ key: of, data: old.key === of ? old.data : null, error: error.message }));
      }
      now.busy = false;
      if (now.again || of !== now.key) {
        now.again = false;
        run();
      }
    }
    run();
    return () => { if (now.key !== key) gone = true; };
  }, [key, tick]);
  return answer.key === key ? answer : { key, data: null, error: null };
}

// A tick that changes more rarely the more an answer of `path` costs, so that a viewer of a live run takes a
// few hundredths of a core.
export function usePaced(tick, path) {
  const [shown, setShown] = useState(tick);
  const last = useRef(0);
  useEffect(() => {
    const show = () => { last.current = performance.now(); setShown(tick); };
    const timer = setTimeout(show, Math.min(15000, last.current + (costs[path] ?? 0) * PACE - performance.now()));
    return () => clearTimeout(timer);
  }, [tick]);
  return shown;
}

const RETRY_MS = 3000;

// Counts, per part of the run, how often it has changed since `parts` was read. Nothing is followed while the page is hidden.
export function useLive(run, parts) {
  const [ticks, setTicks] = useState({});
  useEffect(() => {
    if (!parts) return undefined;
    let seen = { ...parts }, source = null, timer = 0;
    const open = () => {
      clearTimeout(timer);
      source?.close();
      source = null;
      if (document.hidden) return;
      source = new EventSource(address("live", { run }));
      // A browser comes back to a server that is gone, but not to one that answers with an error, as a proxy does meanwhile.
      source.onerror = () => { if (source?.readyState === EventSource.CLOSED) timer = setTimeout(open, RETRY_MS); };
      source.onmessage = (event) => {
        const changed = Object.entries(JSON.parse(event.data)).filter(([part, text]) => seen[part] !== text);
        if (!changed.length) return;
        seen = { ...seen, ...Object.fromEntries(changed) };
        setTicks((old) => ({ ...old, ...Object.fromEntries(changed.map(([part]) => [part, (old[part] ?? 0) + 1])) }));
      };
    };
    open();
    document.addEventListener("visibilitychange", open);
    return () => {
      document.removeEventListener("visibilitychange", open);
      clearTimeout(timer);
      source?.close();
    };
  }, [run, parts !== null && parts !== undefined]);
  return ticks;
}

// Colours ------------------------------------------------------------------------------------------------------------

// Okabe and Ito's colours, in an order in which neighbours differ in lightness too. Red is left for failures.
export const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9"];
export const versionColour = (version) => (version === null || version < 0 ? "#888888" : PALETTE[version % PALETTE.length]);

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const dark = matchMedia("(prefers-color-scheme: dark)");

// Changes when the system turns light or dark: canvases are drawn again.
export function useTheme() {
  const [theme, setTheme] = useState(dark.matches);
  useEffect(() => {
    const change = () => setTheme(dark.matches);
    dark.addEventListener("change", change);
    return () => dark.removeEventListener("change", change);
  }, []);
  return theme;
}

export function useStored(name, initial) {
  const [stored, setStored] = useState(() => {
    try { return localStorage.getItem(`skyrl_train.${name}`) ?? initial; } catch { return initial; }
  });
  const store = (next) => {
    setStored(next);
    try { localStorage.setItem(`skyrl_train.${name}`, next); } catch { /* private browsing */ }
  };
  return [stored, store];
}
