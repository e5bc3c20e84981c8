"use strict";
// Reads the API and shows it. Every text goes in as text, never as markup.
const REFRESH_MS = 5000;
const SHOWN_GPUS = 20000;
const byId = (id) => document.getElementById(id);

function made(tag, text, cls) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (cls) element.className = cls;
  return element;
}

function clock(at) {
  if (!at) return "never";
  const time = new Date(at);
  const today = time.toDateString() === new Date().toDateString();
  return today ? time.toLocaleTimeString() : time.toLocaleString();
}

function counts(map) {
  const parts = Object.entries(map).filter(([, n]) => n).map(([word, n]) => `${n} ${word}`);
  return parts.join(", ") || "none";
}

function facts(s) {
  const rows = [
    ["mode", s.mode],
    ["last tick", `${clock(s.at)}, ${Math.round(1000 * s.tick.duration_s)} ms`],
    ["GPUs", `${s.coverage.gpus_reporting} of ${s.coverage.gpus_expected} report: ${counts(s.gpus)}`],
    ["baseline", s.bundle ? `${s.bundle.id}, learnt up to ${clock(s.bundle.learnt_to)}`
      : "none: hard evidence alone counts"],
  ];
  if (s.pause.on) rows.push(["paused", `since ${clock(s.pause.since)}: ${s.pause.reason}`]);
  if (s.breaker.on) rows.push(["breaker latched", `since ${clock(s.breaker.since)}: ${s.breaker.reason}`]);
  if (s.quarantine.length) rows.push(["quarantine", s.quarantine.map((q) => q.node).join(", ")]);
  for (const a of s.alertmanagers) rows.push(["alertmanager", `${a.url} ${a.up ? "up" : "down: " + a.text}`]);
  byId("facts").replaceChildren(...rows.flatMap(([name, text]) => [made("dt", name), made("dd", text)]));
  byId("cluster").textContent = s.cluster;
  const ready = byId("ready");
  ready.textContent = s.ready ? "watching" : s.reasons.join("; ");
  ready.className = s.ready ? "good" : "bad";
}

function fleet(gpus) {
  const nodes = new Map();
  for (const g of gpus) {
    if (!nodes.has(g.node)) nodes.set(g.node, []);
    nodes.get(g.node).push(g);
  }
  const boxes = [...nodes].sort((a, b) => a[0].localeCompare(b[0], undefined, { numeric: true }))
    .map(([node, members]) => {
      const box = made("span", undefined, "node");
      box.title = node;
      members.sort((a, b) => (a.index ?? 0) - (b.index ?? 0));
      for (const g of members) {
        const square = made("i", undefined, g.kind);
        const score = g.score === null ? "" : `, score ${g.score.toFixed(2)}`;
        square.title = `${node} GPU ${g.index ?? ""} ${g.model}\n${g.uuid}\n${g.kind}${score}`;
        box.append(square);
      }
      return box;
    });
  byId("fleet").replaceChildren(...boxes);
}

function table(id, rows) {
  const body = byId(id).tBodies[0];
  const lines = rows.map((cells) => {
    const line = made("tr");
    for (const cell of cells) line.append(Array.isArray(cell) ? made("td", cell[0], cell[1]) : made("td", cell));
    return line;
  });
  if (!lines.length) {
    const line = made("tr");
    const cell = made("td", "none");
    cell.colSpan = byId(id).tHead.rows[0].cells.length;
    line.append(cell);
    lines.push(line);
  }
  body.replaceChildren(...lines);
}

function subject(i) {
  if (i.subject.kind === "gpu") return [i.node, i.gpu_uuid].filter(Boolean).join(" ");
  const members = i.members.length ? ` (${i.members.length} GPUs)` : "";
  return `${i.subject.kind} ${i.subject.id}${members}`;
}

const work = (row) => row.workload ? `${row.workload.kind} ${row.workload.id}` : "";

async function get(path) {
  const answer = await fetch(`/api/v1/${path}`);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.detail);
  return body;
}

async function refresh() {
  try {
    const [status, gpus, incidents, migrations] = await Promise.all([
      get("status"), get(`gpus?limit=${SHOWN_GPUS}`), get("incidents"),
      get("migrations?state=all&limit=20"),
    ]);
    facts(status);
    fleet(gpus.gpus);
    table("incidents", incidents.incidents.map((i) => [
      clock(i.opened_at), [i.severity, i.severity], `${i.alertname ?? "suspected"}: ${i.pattern}`,
      subject(i),
      [...i.evidence.map((e) => e.text), i.likeness].filter(Boolean).join("; "),
      [i.phase, i.moved && "moved", i.fenced && "fenced", i.part_of && `told by ${i.part_of}`, i.hold_reason].filter(Boolean).join(", "),
    ]));
    table("migrations", migrations.migrations.map((m) => [
      clock(m.since), m.operation, [m.phase, m.phase], m.node,
      (m.placement.length ? m.placement : m.backups).map((p) => p.node).join(", "), work(m), m.reason,
    ]));
  } catch (error) {
    const ready = byId("ready");
    ready.textContent = `no answer from the daemon: ${error.message}`;
    ready.className = "bad";
  }
  setTimeout(refresh, REFRESH_MS);
}

refresh();
