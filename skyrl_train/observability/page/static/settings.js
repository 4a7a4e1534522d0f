// The settings of a run, and what differs from the defaults.
import { html, useState } from "./vendor/preact.js";
import { get, Text, useAnswer, value } from "./util.js";

export function Settings({ run, ticks }) {
  const [all, setAll] = useState(false), [wanted, setWanted] = useState("");
  const { data, error } = useAnswer(() => get("settings", { run }), run, ticks.state);
  if (error) return html`<div class="error">${error}</div>`;
  if (!data) return html`<div class="empty">Reading the configuration …</div>`;
  if (!data.length) return html`<div class="empty">This run has no readable config.yaml.</div>`;
  const differing = data.filter((row) => row.differs);
  const rows = (all ? data : differing).filter((row) => `${row.key} ${value(row.value)}`.toLowerCase().includes(wanted.toLowerCase()));
  return html`
    <div class="bar">
      <span class="choice"><button aria-pressed=${!all} onClick=${() => setAll(false)}>differs from the default (${differing.length})</button>
        <button aria-pressed=${all} onClick=${() => setAll(true)}>all (${data.length})</button></span>
      <input type="search" placeholder="filter" value=${wanted} onInput=${(event) => setWanted(event.target.value)} />
    </div>
    <div class="scroll"><table><thead><tr><th>setting</th><th>value</th><th>default</th></tr></thead><tbody>
      ${rows.map((row) => html`<tr key=${row.key}><td class="mono"><${Text}>${row.key}<//></td>
        <td class="mono wrap">${row.differs && all ? html`<b><${Text} newlines>${value(row.value)}<//></b>` : html`<${Text} newlines>${value(row.value)}<//>`}</td>
        <td class="mono wrap was">${row.known ? html`<${Text}>${value(row.default)}<//>` : html`<i>not a setting of this version</i>`}</td></tr>`)}
    </tbody></table></div>
    <p class="note">Some defaults are null: the run then derives the value, and config.yaml has the derived one.</p>`;
}
