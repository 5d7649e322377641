// The chat page. Everything that comes from outside is written with textContent, never as HTML.
"use strict";

const byId = (id) => document.getElementById(id);
const conversation = [];
const costLines = new Map(); // request id -> the line below an answer
const rows = new Map(); // ledger number -> its list item
const entriesByRequest = new Map();
let models = [];
let running = null;
let currentRequest = "";

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function bytes(count) {
  if (count < 1000) return `${count} B`;
  if (count < 1e6) return `${(count / 1e3).toFixed(1)} kB`;
  return `${(count / 1e6).toFixed(1)} MB`;
}

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

function headers(extra) {
  const key = sessionStorage.getItem("cloister-key");
  return { ...(key ? { authorization: `Bearer ${key}` } : {}), ...extra };
}

async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(options.headers) });
  if (response.ok) return response;
  let error = { message: `The gateway answered with status ${response.status}.` };
  try { error = (await response.json()).error; } catch { /* not JSON: keep the status */ }
  if (response.status === 401) await askForKey();
  throw new Error(error.message);
}

function askForKey() {
  const dialog = byId("key-dialog");
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      sessionStorage.setItem("cloister-key", byId("key").value.trim());
      byId("key").value = "";
      resolve();
      start();
    }, { once: true });
    dialog.showModal();
  });
}

// Calls `each` with every JSON event of a stream, and returns whether it ended as it should.
async function readEvents(response, each) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return false;
    const parts = (pending + value).split("\n\n");
    pending = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data:")) continue;
      const data = part.slice(5).trim();
      if (data === "[DONE]") return true;
      each(JSON.parse(data));
    }
  }
}

// The models and what each is worth

const currentModel = () => models.find((model) => model.id === byId("model").value);

async function loadModels() {
  const answer = await (await ask("v1/models")).json();
  models = answer.data.filter((model) => model.cloister.task === "generate");
  byId("model").replaceChildren(...models.map((model) => {
    const option = make("option", "", model.id);
    option.value = model.id;
    return option;
  }));
  showTrust();
}

function showTrust() {
  const model = currentModel();
  byId("trust").hidden = !model;
  byId("send").disabled = !model;
  if (!model) return;
  const { label, trust, warning } = model.cloister;
  byId("trust").classList.toggle("warning", warning);
  byId("trust-label").textContent = label.charAt(0).toUpperCase() + label.slice(1) + ".";
  // `trust` is the label and the measured figure; the label is already there, in bold
  byId("trust-text").textContent = trust.slice(label.length + 1).trim();
}

// The ledger

async function followLedger() {
  for (;;) {
    try {
      await readEvents(await ask("ledger/events"), showLedger);
    } catch { /* the gateway may be restarting */ }
    await new Promise((resolve) => setTimeout(resolve, 2000));
    rows.clear();
    entriesByRequest.clear();
    byId("entries").replaceChildren();
  }
}

function showLedger({ entries, totals }) {
  byId("total-sent").textContent = bytes(totals.bytes_sent);
  byId("total-received").textContent = bytes(totals.bytes_received);
  byId("total-rounds").textContent = totals.rounds;
  byId("total-seconds").textContent = totals.seconds.toFixed(1);
  for (const entry of entries) {
    let row = rows.get(entry.number);
    if (!row) {
      row = make("li");
      rows.set(entry.number, row);
      byId("entries").prepend(row);
    }
    const head = make("div", "entry-head");
    head.append(make("span", "", entry.step), make("span", "party", `to ${entry.party}`));
    const figures = `${bytes(entry.bytes_sent)} out · ${bytes(entry.bytes_received)} in · ` +
      `${plural(entry.rounds, "round")} · ${entry.seconds.toFixed(2)} s`;
    row.replaceChildren(head, make("div", "entry-figures", figures));
    if (entry.reveals) {
      const reveals = make("div", "entry-reveals", entry.reveals);
      reveals.prepend(make("strong", "", "They can read: "));
      row.append(reveals);
    }
    if (entry.note) row.append(make("div", "entry-note", entry.note));
    row.classList.toggle("current", entry.request !== "" && entry.request === currentRequest);
    if (entry.request) {
      if (!entriesByRequest.has(entry.request)) entriesByRequest.set(entry.request, new Map());
      entriesByRequest.get(entry.request).set(entry.number, entry);
      showCost(entry.request);
    }
  }
  byId("entries-empty").hidden = rows.size > 0;
}

function showCost(request) {
  const line = costLines.get(request);
  const entries = [...(entriesByRequest.get(request) || new Map()).values()];
  if (!line || entries.length === 0) return;
  const sum = (name) => entries.reduce((total, entry) => total + entry[name], 0);
  const parties = [...new Set(entries.map((entry) => entry.party))].join(", ");
  line.textContent = `to ${parties} · ${bytes(sum("bytes_sent"))} out · ${bytes(sum("bytes_received"))} in · ` +
    `${plural(sum("rounds"), "round")} · ${sum("seconds").toFixed(2)} s`;
}

// The conversation

function addMessage(role, text) {
  const item = make("li", role);
  const content = make("div", "text", text);
  item.append(content);
  byId("messages").append(item);
  byId("empty").hidden = true;
  item.scrollIntoView({ block: "end" });
  return { item, content };
}

async function send(text) {
  const model = currentModel();
  conversation.push({ role: "user", content: text });
  addMessage("user", text);
  const { item, content } = addMessage("assistant running", "");
  const list = byId("messages");
  running = new AbortController();
  byId("send").hidden = true;
  byId("stop").hidden = false;
  const limits = { max_tokens: Number(byId("tokens").value), temperature: Number(byId("temperature").value) };
  const chat = model.cloister.chat;
  const body = chat ? { messages: conversation } : { prompt: text };
  let answer = "";
  let finish = "";
  try {
    const response = await ask(chat ? "v1/chat/completions" : "v1/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ model: model.id, stream: true, ...limits, ...body }),
      signal: running.signal,
    });
    currentRequest = response.headers.get("x-request-id") || "";
    const cost = make("div", "cost");
    item.append(cost);
    costLines.set(currentRequest, cost);
    showCost(currentRequest);
    const whole = await readEvents(response, (event) => {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      if (choice && choice.finish_reason) finish = choice.finish_reason;
      const piece = choice ? (chat ? choice.delta.content : choice.text) : "";
      if (!piece) return;
      const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
      answer += piece;
      content.textContent = answer;
      if (atEnd) list.scrollTop = list.scrollHeight;
    });
    if (!whole) throw new Error("The answer was cut off.");
    if (finish === "length") item.append(make("div", "cost", "ended at the token limit"));
  } catch (error) {
    if (error.name !== "AbortError") item.append(make("div", "failure", error.message));
    else item.append(make("div", "cost", "stopped"));
  } finally {
    item.classList.remove("running");
    running = null;
    byId("send").hidden = false;
    byId("stop").hidden = true;
    byId("prompt").focus();
  }
  if (answer) conversation.push({ role: "assistant", content: answer });
  else conversation.pop(); // an unanswered question would confuse the next turn
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt").value.trim();
  if (!text || running || !currentModel()) return;
  byId("prompt").value = "";
  send(text);
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
byId("stop").addEventListener("click", () => running && running.abort());
byId("clear").addEventListener("click", () => {
  if (running) running.abort();
  conversation.length = 0;
  byId("messages").replaceChildren();
  byId("empty").hidden = false;
  byId("prompt").focus();
});
byId("model").addEventListener("change", showTrust);

let following = false;
async function start() {
  try {
    await loadModels();
    if (!following) {
      following = true;
      followLedger();
    }
  } catch (error) {
    byId("trust").hidden = false;
    byId("trust-text").textContent = error.message;
  }
}
start();
