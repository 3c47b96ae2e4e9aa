// Follows /events and shows what it says.
//
// Text from messages is only ever set as text, never as markup. Lists are rebuilt only when they changed, so
// that an opened dead letter stays open and the keyboard focus stays where it is.

const $ = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const fine = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });
const number = (value) => (value < 10 && value % 1 ? fine : whole).format(value);
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const dateAndClock = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

/** The time of day, and the day unless it is today. */
function when(text) {
  const date = new Date(text);
  const today = date.toDateString() === new Date().toDateString();
  return (today ? clock : dateAndClock).format(date);
}

function duration(seconds) {
  if (seconds < 1) return `${whole.format(Math.max(1, seconds * 1000))} ms`;
  if (seconds < 100) return `${number(seconds)} s`;
  if (seconds < 6000) return `${whole.format(seconds / 60)} min`;
  if (seconds < 48 * 3600) return `${whole.format(seconds / 3600)} h`;
  return `${whole.format(seconds / 86400)} d`;
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.filter((child) => child != null));
  return made;
}

const text = (id, value) => {
  if ($(id).textContent !== value) $(id).textContent = value;
};

const shown = new Map();

/** Rebuilds a list only when what it shows has changed. */
function list(id, items, make, none) {
  const now = JSON.stringify(items);
  if (shown.get(id) === now) return;
  shown.set(id, now);
  const rows = items.map(make);
  if (!rows.length && none) rows.push(element($(id).tagName === "UL" ? "li" : "p", { class: "none" }, none));
  $(id).replaceChildren(...rows);
}

function figure(id, value, tone) {
  text(id, value);
  if (tone) $(id).dataset.tone = tone;
  else delete $(id).dataset.tone;
}

function figures(counts) {
  figure("pending", number(counts.pending));
  figure("in-flight", number(counts.inFlight));
  figure("failed", number(counts.failed), counts.failed ? "warn" : null);
  figure("sent", number(counts.sent));
  figure("dead", number(counts.dead), counts.dead ? "bad" : null);
  const age = counts.oldestAge;
  figure("oldest", age == null ? "none" : duration(age), age > 300 ? "bad" : null);
  const failures = counts.publishFailureTotal;
  text("totals", `${number(counts.publishSuccessTotal)} sent in all, ${number(failures)} ${failures === 1 ? "try" : "tries"} in vain`);
  text("write-to-sent", spread(counts.writeToSent));
  text("sent-to-acknowledged", spread(counts.sentToAcknowledged));
}

/** The bounds under which half and nearly all waits lie: as exact as the histogram is. */
function spread({ bounds, counts }) {
  const all = counts.reduce((sum, count) => sum + count, 0);
  if (!all) return "nothing yet";
  const under = (share) => {
    let seen = 0;
    const at = counts.findIndex((count) => (seen += count) >= all * share);
    return at < bounds.length ? `≤ ${duration(bounds[at])}` : `> ${duration(bounds.at(-1))}`;
  };
  return `half ${under(0.5)}, 99 % ${under(0.99)}`;
}

function throughput(rates) {
  const recent = rates.slice(-5);
  const rate = recent.length ? recent.reduce((sum, value) => sum + value, 0) / recent.length : 0;
  text("rate", rates.length ? number(rate) : "–");
  const peak = Math.max(1, ...rates);
  text("peak", rates.length ? `peak ${number(Math.max(0, ...rates))} per second` : "");
  const points = rates.map((value, at) => [600 - (rates.length - 1 - at) * (600 / 59), 118 - (value / peak) * 112]);
  const path = points.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  $("line").setAttribute("d", path);
  $("area").setAttribute("d", points.length > 1 ? `${path}L600 120L${points[0][0].toFixed(1)} 120Z` : "");
}

function ranges(numbers) {
  const parts = [];
  for (const value of numbers) {
    const last = parts.at(-1);
    if (last && last[1] === value - 1) last[1] = value;
    else parts.push([value, value]);
  }
  return parts.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ");
}

function lanes(all) {
  text("lanes-count", `${all.length}`);
  $("lanes").toggleAttribute("data-many", all.length > 64);
  const plain = all.map(({ lane, epoch, owner, inFlight }) => ({ lane, epoch, owner, inFlight }));
  list("lanes", plain, ({ lane, epoch, owner, inFlight }) => {
    const state = !owner ? "free" : inFlight ? "busy" : "held";
    const label = `lane ${lane}, epoch ${epoch}: ${owner ? `held by ${owner}, ${inFlight} in flight` : "free"}`;
    return element("li", { "data-state": state, title: label, "aria-label": label });
  });
  const owners = new Map();
  for (const { lane, owner, inFlight } of all) {
    const name = owner ?? "";
    const entry = owners.get(name) ?? { name, lanes: [], inFlight: 0 };
    entry.lanes.push(lane);
    entry.inFlight += inFlight;
    owners.set(name, entry);
  }
  list("owners", [...owners.values()], (owner) => {
    const held = `${owner.lanes.length === 1 ? "lane" : "lanes"} ${ranges(owner.lanes)}`;
    const work = owner.name ? `${held}, ${number(owner.inFlight)} in flight` : `${held}, held by no relay`;
    return element("li", {}, element("span", { class: "name" }, owner.name || "free"), element("span", { class: "detail" }, work));
  }, "no lanes");
}

function parts(components) {
  const failing = components.filter(({ ok }) => !ok).length;
  text("parts-count", failing ? `${failing} failing` : "");
  list("parts", components, ({ name, ok, detail }) => {
    const word = ok ? "works" : "fails";
    const dot = element("span", { class: "dot", "data-state": ok ? "good" : "bad", role: "img", "aria-label": word });
    const body = element("div", {}, element("span", { class: "name" }, name), " ", element("span", { class: "detail" }, detail));
    return element("li", { class: "part" }, dot, body);
  }, "No parts run in this process.");
}

/** JSON on several lines, token by token: parsed and written again, large numbers would lose digits. */
function laidOut(json) {
  if (!/^\s*[[{]/.test(json)) return json;
  let depth = 0;
  const line = () => `\n${"  ".repeat(depth)}`;
  const tokens = json.match(/"(?:\\.|[^"\\])*"|[[\]{}:,]|[^\s[\]{}:,"]+/g) ?? [];
  return tokens.map((token, at) => {
    const [before, after] = [tokens[at - 1], tokens[at + 1]];
    if (token === "{" || token === "[") {
      depth += 1;
      return after === "}" || after === "]" ? token : token + line();
    }
    if (token === "}" || token === "]") {
      depth -= 1;
      return before === "{" || before === "[" ? token : line() + token;
    }
    if (token === ",") return token + line();
    return token === ":" ? ": " : token;
  }).join("");
}

function letter(message) {
  const facts = element("dl");
  const fact = (name, value, code) => {
    if (value == null || value === "") return;
    facts.append(element("dt", {}, name), element("dd", {}, code ? element("code", {}, value) : value));
  };
  fact("Id", message.messageId, true);
  fact("Type", message.type);
  fact("Key", message.key);
  fact("Reason", message.reason);
  fact("Last error", message.error);
  fact("Attempts", `${message.attempts}`);
  fact("Written", dateAndClock.format(new Date(message.writtenAt)));
  const payload = message.cut ? `${message.payload} …` : laidOut(message.payload);
  return element(
    "details",
    { "data-id": message.messageId },
    element(
      "summary",
      {},
      element("span", { class: "topic" }, message.topic),
      element("span", { class: "reason" }, message.reason ?? message.error ?? "no reason given"),
      element("time", { datetime: message.writtenAt }, when(message.writtenAt)),
    ),
    element("div", { class: "letter" }, facts, element("pre", { tabindex: "0", "aria-label": "Payload" }, payload)),
  );
}

function letters(items) {
  const open = new Set([...document.querySelectorAll("#letters details[open]")].map((one) => one.dataset.id));
  list("letters", items, (message) => {
    const made = letter(message);
    made.open = open.has(message.messageId);
    return made;
  }, "None: nothing waits for a person.");
}

function show(data) {
  $("trouble").hidden = !data.problem;
  if (data.problem) {
    text("trouble", data.problem);
    return;
  }
  figures(data.counts);
  throughput(data.throughput);
  lanes(data.lanes);
  parts(data.components);
  text("holds-count", data.holds.length ? `${data.holds.length}` : "");
  list("holds", data.holds, ({ topic, key, messageId, status }) =>
    element("li", {}, element("span", { class: "name" }, key), element("span", { class: "detail" }, `on ${topic}, behind a ${status ?? "removed"} message`), messageId ? element("code", { class: "detail" }, messageId) : null),
    "None: every key moves.");
  text("dead-count", data.counts.dead ? `${number(data.counts.dead)} in all` : "");
  letters(data.dead);
  document.title = data.counts.dead ? `Postrider (${number(data.counts.dead)} dead)` : "Postrider";
  const failing = data.components.filter(({ ok }) => !ok).length;
  if (failing) state("failing", `live, ${failing} ${failing === 1 ? "part" : "parts"} failing`);
  else state("live", `live, ${clock.format(new Date(data.at))}`);
}

function state(word, label) {
  $("link").dataset.state = word;
  $("main").dataset.state = word;
  text("link-text", label);
}

/** What is promised changes only with the settings: it is asked for once. */
async function contract() {
  const answer = await fetch("/api/contract");
  if (!answer.ok) return;
  const { store, routes, consumers } = await answer.json();
  const words = [
    ["promises", "Promised"], ["mechanisms", "By"], ["loss", "Lost, or waiting for a person, when"],
    ["duplicates", "Twice when"], ["needs", "Needed of the broker"],
  ];
  const part = (kind) => (told) => {
    const lines = words.filter(([field]) => told[field].length).flatMap(([field, word]) =>
      [element("dt", {}, word), ...told[field].map((line) => element("dd", {}, line))]);
    const settings = Object.entries(told.settings).map(([name, value]) => `${name} = ${value}`).join(", ");
    if (settings) lines.push(element("dt", {}, "Settings that matter"), element("dd", {}, settings));
    return element("details", {},
      element("summary", {},
        element("span", { class: "topic" }, `${kind} ${told.name}`),
        element("span", { class: "reason" }, told.semantics ?? told.promises[0] ?? "")),
      element("div", { class: "letter" }, told.why ? element("p", {}, `Because: ${told.why}`) : null, element("dl", {}, ...lines)));
  };
  $("contract").replaceChildren(part("store")(store), ...routes.map(part("route")), ...consumers.map(part("group")));
}

let source = null;

function follow() {
  if (source) return;
  source = new EventSource("/events");
  source.onmessage = (event) => show(JSON.parse(event.data));
  source.onerror = () => state("lost", "connection lost, trying again");
}

// A page that nobody sees asks for nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    source?.close();
    source = null;
  } else {
    follow();
  }
});

follow();
contract();
