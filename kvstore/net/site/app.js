"use strict";
// State in, elements out. Names come from outside: they only ever become text nodes.

const PERIOD_MS = 2000, SAMPLES = 60;
const TIERS = { engine: "engine's own cache", hbm: "hbm", dram: "dram", file: "disk", peer: "other nodes", none: "computed" };
const $ = (id) => document.getElementById(id);
let samples = [];

function h(tag, props, ...children) {
  const svg = ["svg", "path", "line", "circle", "text"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (name === "share") node.style.width = `${100 * Math.min(1, value || 0)}%`;
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

// ── figures ──────────────────────────────────────────────────────────────────────────────────────

const short = (x) => (Math.abs(x) < 99.95 ? x.toFixed(1).replace(/\.0$/, "") : Math.round(x).toLocaleString("en"));
const scaled = (x, names, step) => {
  let at = 0;
  while (Math.abs(x) >= step && at < names.length - 1) { x /= step; at += 1; }
  return at || names[0] ? `${short(x)} ${names[at]}` : Math.round(x).toLocaleString("en");
};
const bytes = (x) => scaled(x, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
const count = (x) => (Math.abs(x) < 100000 ? Math.round(x).toLocaleString("en") : scaled(x, ["", "k", "M", "G", "T"], 1000));
const percent = (x) => `${short(100 * x)} %`;
const us = (x) => {
  for (const [unit, size] of [["d", 864e8], ["h", 36e8], ["min", 6e7], ["s", 1e6]]) {
    if (Math.abs(x) >= size * (unit === "d" ? 2 : 1)) return `${short(x / size)} ${unit}`;
  }
  return `${short(x / 1000)} ms`;
};
const ms = (x) => us(x * 1000);
const ago = (x) => `${x < 60000 ? `${Math.round(x / 1000)} s` : ms(x)} ago`;
const signed = (x) => (x < 0 ? `−${ms(-x)}` : `+${ms(x)}`);
const sum = (values) => values.reduce((total, value) => total + value, 0);

// ── parts ────────────────────────────────────────────────────────────────────────────────────────

const muted = (...text) => h("p", { class: "muted" }, ...text);
const swatch = (kind) => h("span", { class: `swatch f-${kind}`, "aria-hidden": "true" });

function bar(parts, label, tall) {
  const spans = parts.filter(([, share]) => share > 0).map(([kind, share]) => h("span", { class: `f-${kind}`, share }));
  return h("div", { class: tall ? "bar tall" : "bar", role: "img", "aria-label": label }, spans);
}

function meter(kind, name, share, text) {
  return [h("div", { class: "row" }, h("span", null, swatch(kind), name), h("span", null, text)), bar([[kind, share]], `${name}: ${text}`)];
}

function table(caption, columns, rows) {
  const cls = (column) => column[2] || null;
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", null,
      h("thead", null, h("tr", null, columns.map((c) => h("th", { scope: "col", class: cls(c) }, c[0])))),
      h("tbody", null, rows.map((row) => h("tr", null, columns.map((c) => {
        const made = typeof c[1] === "function" ? c[1](row) : row[c[1]];
        return h("td", { class: cls(c), title: cls(c) === "name" ? made : null }, [null, undefined, ""].includes(made) ? "–" : made);
      }))))));
}

const opener = (number, text) => h("button", { type: "button", "data-request": number, "data-key": `request-${number}` }, text);

const facts = (pairs) => h("dl", null, pairs.filter(([, text]) => text).map(([name, text]) => [h("dt", null, name), h("dd", null, text)]));

// ── cards ────────────────────────────────────────────────────────────────────────────────────────

function tiers(state) {
  return state.tiers.map((t) => {
    if (!t.capacity_bytes) return muted(`${TIERS[t.tier]}: off. Start the node with --file DIRECTORY:SIZE to keep blocks on disk.`);
    const share = t.used_bytes / t.capacity_bytes;
    const text = `${bytes(t.used_bytes)} of ${bytes(t.capacity_bytes)}`;
    const age_s = state.evicted_age_s[t.tier], age = age_s ? `evicted after ${us(age_s * 1e6)} without use, on average` : "nothing evicted yet";
    const broken = [["reads", t.reads], ["writes", t.writes]].filter(([, word]) => word !== "closed");
    return h("div", null, meter(t.tier, TIERS[t.tier], share, `${text} · ${percent(share)}`),
      muted(`${count(t.blocks)} blocks · ${t.policy} · ${age}`),
      broken.map(([way, word]) => h("p", { class: "bad" }, `circuit breaker of ${way}: ${word}`)));
  });
}

function sources(state) {
  const hits = Object.entries(state.hits), misses = Object.entries(state.misses).filter(([, n]) => n).sort((a, b) => b[1] - a[1]);
  const hit = sum(hits.map(([, n]) => n)), all = hit + sum(misses.map(([, n]) => n));
  if (!all) return [muted("No request has ended yet. Send one to an engine with the kvstore connector; 'kvstore doctor' finds what is in its way.")];
  const line = (kind, name, n) => meter(kind, name, n / all, `${count(n)} · ${percent(n / all)}`);
  return [
    h("p", { class: "big" }, percent(hit / all), h("small", null, " of blocks that engines asked for were hits")),
    hits.filter(([, n]) => n).map(([tier, n]) => line(tier, `hit: ${TIERS[tier] || tier}`, n)),
    misses.slice(0, 5).map(([why, n]) => line("none", `missed: ${why}`, n))];
}

function flows(state) {
  const now = samples[samples.length - 1], before = samples[samples.length - 2];
  const rate = (name, a, b) => (a && b ? Math.max(0, b.flows[name] - a.flows[name]) / ((b.at_ms - a.at_ms) / 1000) : null);
  const rows = Object.entries(state.flows).filter(([, total]) => total).map(([name, total]) => ({
    label: name.replace("_total", "").replace(/_/g, " "), unit: name.endsWith("bytes") ? bytes : count, total, rate: rate(name, before, now),
    rates: samples.slice(1).map((sample, at) => rate(name, samples[at], sample)),
  }));
  if (!rows.length) return [muted("Nothing has moved since the start.")];
  return [table("Flows", [
    ["flow", "label"],
    ["now", (r) => (r.rate === null ? "…" : `${r.unit(r.rate)}/s`), "num"],
    ["2 minutes", spark, "num far"],
    ["total", (r) => r.unit(r.total), "num"],
  ], rows)];
}

function spark(row) {
  const top = Math.max(...row.rates, 1e-9), step = 90 / (SAMPLES - 1);
  const points = row.rates.map((rate, at) => `${at ? "L" : "M"}${(at * step).toFixed(1)} ${(17 - 16 * (rate / top)).toFixed(1)}`);
  return h("svg", { class: "spark", viewBox: "0 0 90 18", "aria-hidden": "true" }, h("path", { class: "line", d: points.join("") || "M0 17" }));
}

function curve(state) {
  const rows = state.curve, one = rows.find((row) => row.capacity === "1x");
  if (!one) return [muted("No curve.")];
  if (one.trouble) return [h("p", { class: "bad" }, `The curve is off after an error: ${one.trouble}`)];
  if (one.hit_ratio === null) {
    return [muted(`Too few lookups yet: ${count(one.blocks)} of ${count(one.blocks_needed)} blocks. It appears by itself with traffic.`)];
  }
  const x = (at) => 46 + (at * 300) / (rows.length - 1), y = (ratio) => 150 - 130 * ratio;
  const text = (row) => `${bytes(row.capacity_bytes)}: ${row.is_least && row.hit_ratio < 1 ? "at least " : ""}${percent(row.hit_ratio)}`;
  const two = rows.find((row) => row.capacity === "2x"), more = two.prefill_ms_per_day - one.prefill_ms_per_day;
  const gain = two.prefill_ms_per_day === null ? "" : `, ${ms(Math.max(0, more))} of prefill a day more`;
  return [
    h("svg", { viewBox: "0 0 370 192", role: "img", "aria-label": `Expected hits by dram size: ${rows.map(text).join(", ")}` },
      [0, 0.25, 0.5, 0.75, 1].map((r) => [
        h("line", { class: "grid", x1: 40, x2: 352, y1: y(r), y2: y(r) }),
        h("text", { x: 35, y: y(r) + 4, "text-anchor": "end" }, `${100 * r} %`)]),
      h("line", { class: "grid", x1: x(rows.indexOf(one)), x2: x(rows.indexOf(one)), y1: 12, y2: 150, "stroke-dasharray": "3 3" }),
      h("text", { class: "strong", x: x(rows.indexOf(one)), y: 10, "text-anchor": "middle" }, "now"),
      h("path", { class: "line", d: rows.map((row, at) => `${at ? "L" : "M"}${x(at)} ${y(row.hit_ratio)}`).join("") }),
      rows.map((row, at) => [
        h("circle", { class: row === one ? "dot now" : "dot", cx: x(at), cy: y(row.hit_ratio), r: 4 }),
        h("text", { class: row === one ? "strong" : null, x: x(at), y: 166, "text-anchor": "middle" }, bytes(row.capacity_bytes))]),
      h("text", { x: 196, y: 185, "text-anchor": "middle" }, "dram of this node → hits among looked-up prompt tokens")),
    h("p", null, `With ${bytes(two.capacity_bytes)} instead of ${bytes(one.capacity_bytes)}: ${short(100 * one.hit_ratio)} → ${short(100 * two.hit_ratio)} % of prompt tokens${gain}.`)];
}

function savings(state) {
  if (!state.savings.length) return [muted("Nothing yet: no request has loaded blocks or waited for them.")];
  const net = sum(state.savings.map((row) => row.net_gpu_ms));
  return [
    h("p", { class: `big ${net < 0 ? "bad" : "good"}` }, signed(net), h("small", null, " of GPU time since the start")),
    table("Savings", [
      ["model", (r) => [r.model || "–", h("br"), h("small", null, `${r.tenant} · ${TIERS[r.tier] === "computed" ? "nothing came" : TIERS[r.tier]}`)]],
      ["saved", (r) => ms(r.saved_ms), "num"], ["waited", (r) => ms(r.spent_ms), "num"],
      ["net GPU", (r) => h("span", { class: r.net_gpu_ms < 0 ? "bad" : "good" }, signed(r.net_gpu_ms)), "num"],
    ], state.savings)];
}

function prediction(state) {
  const its = state.prediction;
  if (!its.prompt_tokens_total) return [muted("No engine has reported cached tokens yet: vLLM does with --enable-prompt-tokens-details, in streams if the client asks for usage.")];
  const line = (kind, name, tokens) => meter(kind, name, tokens / its.prompt_tokens_total, percent(tokens / its.prompt_tokens_total));
  return [
    line("dram", "cached, as engines report", its.cached_tokens_total), line("none", "predicted", its.predicted_tokens_total),
    muted(its.ttft_p50_ms.achieved ? `Median time to the first token, at most: ${ms(its.ttft_p50_ms.achieved)}, predicted ${ms(its.ttft_p50_ms.predicted)}.` : "No time to the first token yet: only streamed answers show it.")];
}

function mix(r) {
  const parts = { engine: r.local_tokens, dram: r.loaded_tokens - r.file_tokens - r.peer_tokens, file: r.file_tokens, peer: r.peer_tokens };
  parts.none = r.prompt_tokens - r.local_tokens - r.loaded_tokens;
  const told = Object.entries(parts).filter(([, n]) => n > 0);
  return bar(told.map(([kind, n]) => [kind, n / r.prompt_tokens]), told.map(([kind, n]) => `${count(n)} ${TIERS[kind]}`).join(", ") || "no tokens");
}

const COLUMNS = {
  requests: [
    ["ended", (r) => opener(r.number, ago(r.ended_ms_ago))],
    ["model", (r) => r.label || "–", "name"], ["tenant", "tenant", "name far"], ["engine", "engine_id", "name far"],
    ["prompt", (r) => count(r.prompt_tokens), "num far"],
    ["tokens by source", mix, "far"],
    ["loaded", (r) => count(r.loaded_tokens), "num"],
    ["waited", (r) => us(r.lookup_us + r.promotion_us + r.load_us), "num far"],
    ["outcome", (r) => r.text || "loaded", "text far"], ["outcome", (r) => r.outcome || "loaded", "near"],
  ],
  decisions: [
    ["decided", (r) => opener(r.number, ago(r.ms_ago))],
    ["model", (r) => r.model || "–", "name"], ["tenant", "tenant", "name far"], ["worker", (r) => r.chosen || "none", "name"],
    ["prompt", (r) => (r.prompt_is_estimated ? "≈ " : "") + count(r.prompt_tokens), "num far"],
    ["cached, predicted", (r) => count(r.expected_tokens), "num far"],
    ["cached", (r) => (r.cached_tokens === null ? null : count(r.cached_tokens)), "num far"],
    ["held", (r) => ms(r.held_s * 1000), "num far"],
    ["TTFT, predicted", (r) => ms(r.predicted_s * 1000), "num far"],
    ["TTFT", (r) => (r.ttft_s === null ? null : ms(r.ttft_s * 1000)), "num"],
    ["end", (r) => r.rejected || r.end || "under way"],
  ],
  workers: [
    ["worker", "name", "name"], ["state", (r) => h("span", { class: r.state === "up" ? "good" : "bad" }, r.state)],
    ["pool", "pool", "far"], ["role", "role", "far"],
    ["in flight", (r) => count(r.in_flight), "num"], ["requests", (r) => count(r.request_count || 0), "num"],
    ["failed", (r) => count(r.failure_count || 0), "num far"],
    ["cached", (r) => (r.prompt_tokens ? percent(r.cached_tokens / r.prompt_tokens) : null), "num"],
    ["predicted", (r) => (r.prompt_tokens ? percent(r.predicted_tokens / r.prompt_tokens) : null), "num far"],
    ["why", "why", "text far"],
  ],
  nodes: [
    ["node", "node", "name"], ["trust", (r) => h("span", { class: r.trust === "exact" ? "good" : "bad" }, r.trust)],
    ["dram", (r) => (r.dram_bytes ? bar([["dram", r.dram_used_bytes / r.dram_bytes]], `${bytes(r.dram_used_bytes)} of ${bytes(r.dram_bytes)}`) : null), "far"],
    ["used", (r) => (r.dram_bytes ? bytes(r.dram_used_bytes) : null), "num"],
    ["hits", (r) => (r.blocks_hit + r.blocks_missed ? percent(r.blocks_hit / (r.blocks_hit + r.blocks_missed)) : null), "num"],
    ["net saved", (r) => (r.saved_ms === null ? null : signed(r.saved_ms - r.waited_ms)), "num far"],
    ["engines", "engines", "num"], ["models", "models", "name far"], ["address", "address", "name far"],
  ],
  transfers: [
    ["part", "kind"], ["over", "backend"], ["count", (r) => count(r.count), "num"],
    ["p50", (r) => us(r.p50_us), "num"], ["p99", (r) => us(r.p99_us), "num"], ["rate", (r) => `${bytes(r.bytes_per_s)}/s`, "num far"],
  ],
  unserved: [["engine", "engine"], ["why it gets no blocks", "reason", "text"]],
  pools: [
    ["pool", (r) => r.pool || "(default)"], ["saturation", (r) => percent(r.saturation), "num"], ["cause", "cause"],
  ],
};
const EMPTY = {
  requests: "No request has ended since the node started. Send one to an engine with the kvstore connector.",
  decisions: "No request has ended since the router started. Send one to its /v1.",
  workers: "No worker: start the router with --worker, or --discover.",
  nodes: "No node publishes to this index: start one with --index and this address.",
};

function rows(name) {
  return (state) => {
    const shown = state[name], total = state.totals[name];
    if (!shown.length) return [muted(EMPTY[name] || "None.")];
    const more = total > shown.length ? [muted(`${count(total - shown.length)} of ${count(total)} are not shown; those that matter most come first.`)] : [];
    return [table(CARDS[name][0], COLUMNS[name], shown), ...more];
  };
}

const CARDS = {
  unserved: ["Engines without blocks", rows("unserved"), "wide"],
  tiers: ["Tiers", tiers], hits: ["Sources of prompt blocks", sources], flows: ["Flows", flows],
  curve: ["With more or less dram", curve], savings: ["Savings", savings],
  prediction: ["Cached tokens, predicted and true", prediction], pools: ["Pools", rows("pools")], transfers: ["Transfers between nodes", rows("transfers")],
  workers: ["Workers", rows("workers"), "wide"], nodes: ["Nodes", rows("nodes"), "wide"],
  requests: ["Latest requests", rows("requests"), "wide"], decisions: ["Latest decisions", rows("decisions"), "wide"],
};
const OPTIONAL = ["unserved", "transfers"];

function show(state) {
  $("title").textContent = document.title = `kvstore ${state.role}${state.name ? ` ${state.name}` : ""}`;
  $("health").textContent = state.health.text;
  $("facts").textContent = Object.entries(state.facts).map(([name, value]) => `${name} ${typeof value === "number" ? count(value) : value}`).join(" · ");
  $("health").className = state.health.text === "ok" ? "good" : state.health.is_ok ? "" : "bad";
  const key = document.activeElement && document.activeElement.dataset.key;
  for (const [name, [title, render, cls]] of Object.entries(CARDS)) {
    const old = $(`card-${name}`);
    if (state[name] === undefined || (OPTIONAL.includes(name) && !state[name].length)) { if (old) old.remove(); continue; }
    const card = h("section", { id: `card-${name}`, class: cls, }, h("h2", null, title), render(state));
    if (!old) $("cards").append(card);
    else if (!old.isEqualNode(card)) old.replaceWith(card);
  }
  const again = key && document.querySelector(`[data-key="${key}"]`);
  if (again && again !== document.activeElement) again.focus({ preventScroll: true });
}

// ── one request ──────────────────────────────────────────────────────────────────────────────────

function timeline(parts) {
  const whole = sum(parts.map(([, , time]) => time)) || 1;
  return [
    bar(parts.map(([kind, , time]) => [kind, time / whole]), parts.map(([, name, time]) => `${name} ${us(time)}`).join(", "), true),
    h("dl", null, parts.filter(([, , time]) => time > 0).map(([kind, name, time]) => [h("dt", null, swatch(kind), name), h("dd", null, us(time))]))];
}

function storyOfNode(r) {
  const waits = [["queued", "queued", r.queued_us], ["lookup", "lookup", r.lookup_us], ["promotion", "waited for blocks", r.promotion_us], ["load", "load", r.load_us]];
  const rest = Math.max(0, r.first_token_us - sum(waits.map(([, , time]) => time)));
  const waited = r.lookup_us + r.promotion_us + r.load_us;
  return [
    facts([["outcome", r.text || "loaded"], ["model", r.label], ["tenant", r.tenant], ["engine", r.engine_id], ["ended", ago(r.ended_ms_ago)],
      ["prompt", `${count(r.prompt_tokens)} tokens: ${count(r.local_tokens)} in the engine's own cache, ${count(r.loaded_tokens)} loaded`],
      ["first token", r.first_token_us ? `${us(r.first_token_us)} after it came` : ""],
      ["saved", `${signed((r.saved_us - waited) / 1000)}: ${us(r.saved_us)} of prefill less ${us(waited)} of waits`]]),
    h("h2", null, "Until its first token"), timeline([...waits, ["compute", "computed, and waited to be", rest]]),
    h("h2", null, "Its prompt, block by block"),
    table("Blocks of the prompt", [
      ["blocks", (b) => `${b.first_block}–${b.first_block + b.blocks - 1}`, "num"], ["tier", (b) => TIERS[b.tier] || "–"],
      ["why", "text", "text"]], r.ranges)];
}

function storyOfRouter(r) {
  const end = r.outcome.ttft_s === null ? r.predicted_s : r.outcome.ttft_s;
  return [
    facts([["worker", r.chosen || "none"], ["prefill by", r.prefill_worker], ["model", r.model], ["tenant", r.tenant], ["policy", r.policy],
      ["end", r.outcome.rejected || r.outcome.end], ["first token", r.outcome.ttft_s === null ? "" : `${ms(r.outcome.ttft_s * 1000)}, predicted ${ms(r.predicted_s * 1000)}`],
      ["prefill", r.split_reason], ["degraded", r.degraded.join(", ")]]),
    h("h2", null, `Until its first token${r.outcome.ttft_s === null ? ", as predicted" : ""}`),
    timeline([["queued", "held by the router", r.held_s * 1e6], ["compute", "at the worker", Math.max(0, end - r.held_s) * 1e6]]),
    h("h2", null, "Workers that could take it, best first"),
    table("Candidates", [["worker", "worker"], ["score", (c) => c.score.toFixed(4), "num"], ["cached", (c) => count(c.cached), "num"], ["left out", (c) => c.filtered || "–"]], r.candidates)];
}

async function open(number) {
  $("story-title").textContent = `Request ${number}`;
  $("story-body").replaceChildren(muted("Waiting …"));
  if (!$("story").open) $("story").showModal();
  try {
    const answer = await fetch(`request.json?id=${number}`);
    if (!answer.ok) throw new Error((await answer.text()).trim());
    const its = await answer.json();
    $("story-title").textContent = `Request ${its.request || its.request_id || number}`;
    $("story-body").replaceChildren(...(its.ranges ? storyOfNode(its) : storyOfRouter(its)).flat(Infinity));
  } catch (error) { $("story-body").replaceChildren(h("p", { class: "bad" }, error.message)); }
}

// ── polling ──────────────────────────────────────────────────────────────────────────────────────

async function poll() {
  if (document.visibilityState !== "visible") return;
  try {
    const answer = await fetch("state.json");
    if (!answer.ok) throw new Error((await answer.text()).trim());
    const state = await answer.json(), last = samples[samples.length - 1];
    if (last && last.at_ms > state.at_ms) samples = []; // another machine, or it was booted
    if (!last || last.at_ms !== state.at_ms) samples = [...samples, { at_ms: state.at_ms, flows: state.flows }].slice(-SAMPLES);
    show(state);
    $("link").textContent = state.version;
    $("cards").className = "";
  } catch (error) {
    $("link").textContent = `shown as it was: ${error.message}`;
    $("cards").className = "late";
  }
}

document.addEventListener("click", (event) => {
  const number = event.target.dataset && event.target.dataset.request;
  if (number) open(number);
});
document.addEventListener("visibilitychange", poll);
setInterval(poll, PERIOD_MS);
poll();
