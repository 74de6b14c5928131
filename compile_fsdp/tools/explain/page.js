"use strict";
// Draws the page from the data in it. Text from the model becomes text of the document, never markup.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const LEFT = 104, RIGHT = 14, WIDTH = 1360;
const COLORS = {compute: "compute", copy: "copy", gather: "gather", reduce: "reduce", "all-reduce": "all-reduce", offload: "offload",
  fetch: "offload", wait: "exposed"};
const color = (kind) => `var(--${COLORS[kind]})`;

function make(tag, attributes = {}, ...children) {
  const isSvg = ["svg", "g", "rect", "line", "path", "text", "pattern", "defs"].includes(tag);
  const element = isSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const round = (value) => Number(value.toPrecision(3)).toString();
const seconds = (s) => s >= 1 ? `${round(s)} s` : s >= 1e-3 ? `${round(s * 1e3)} ms` : `${round(s * 1e6)} us`;
function bytes(size) {
  let unit = 0;
  for (; size >= 1024 && unit < 4; unit++) size /= 1024;
  return `${size >= 100 || unit === 0 ? Math.round(size) : round(size)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

// ---- Events and where they are drawn
const step = data.figures.graph_s.reduce((sum, each) => sum + each, 0);
const events = data.timeline.map((each) => {
  const {kind, name, parameters, operations} = each.event;
  const length = kind === "wait" ? each.exposed_s : each.event.seconds;
  return {...each, ...each.event, length, end: each.start_s + length,
          text: [kind, name, ...parameters, ...each.event.gradients, ...operations].join(" ").toLowerCase()};
});
const end = Math.max(step, ...events.map((each) => each.end), 1e-9);
const borders = data.graphs.map((_, number) => Math.min(end, ...events.filter((e) => e.graph === number).map((e) => e.at_s)));
const lanes = [["compute", ["compute", "copy", "wait"]], ["all-gather", ["gather"]], ["reduce-scatter", ["reduce"]],
  ["all-reduce", ["all-reduce"]], ["host memory", ["offload", "fetch"]]]
  .filter(([name, kinds], i) => i < 3 || events.some((e) => kinds.includes(e.kind)));
let view = [0, end];
const x = (s) => LEFT + (s - view[0]) / (view[1] - view[0]) * (WIDTH - LEFT - RIGHT);
const numbered = (number) => data.figures.graph_names[number];

// ---- Search
let query = "";
const matches = (text) => text.toLowerCase().includes(query);
function search() {
  query = byId("search").value.trim().toLowerCase();
  for (const [event, element] of drawn) element.classList.toggle("dim", query !== "" && !event.text.includes(query));
  const rows = [...byId("groups").querySelectorAll("tbody tr")];
  for (const row of rows) row.hidden = query !== "" && !matches(row.dataset.text);
  const lines = drawDiff();
  const counts = [[events.filter((e) => e.text.includes(query)).length, "events"],
    [rows.filter((row) => !row.hidden).length, "groups"], [lines, "lines"]];
  byId("found").textContent = query === "" ? "" : counts.map(([count, what]) => `${count} ${count === 1 ? what.slice(0, -1) : what}`).join(", ");
}

// ---- Charts
const tip = byId("tip");
function showTip(pointer, lines) {
  tip.replaceChildren(...lines.filter(Boolean).map((line, i) => make(i === 0 ? "b" : "div", {}, line)));
  tip.hidden = false;
  tip.style.left = `${Math.min(pointer.clientX + 14, innerWidth - tip.offsetWidth - 10)}px`;
  tip.style.top = `${Math.min(pointer.clientY + 16, innerHeight - tip.offsetHeight - 10)}px`;
}
function few(list, count) {
  return list.slice(0, count).join(", ") + (list.length > count ? ` and ${list.length - count} more` : "");
}
function describe(event) {
  const titles = {gather: "all-gather", reduce: "reduce-scatter", wait: "exposed: compute waits", copy: "copy", compute: "compute"};
  return [`${event.name} (${titles[event.kind] || event.kind})`,
    `${seconds(event.length)} from ${seconds(event.start_s)}, ${numbered(event.graph)} graph`,
    event.size_bytes > 0 && `${bytes(event.size_bytes)} over all ranks`,
    event.parameters.length > 0 && few(event.parameters, 6),
    event.gradients.length > 0 && `gradient of ${few(event.gradients, 4)}`, few(event.operations, 8),
    `alive: ${bytes(event.alive_bytes)} of parameters, ${bytes(event.activation_bytes)} of activations and gradients`,
    event.recomputed_bytes > 0 && `${bytes(event.recomputed_bytes)} computed again`,
    event.offloaded_bytes > 0 && `${bytes(event.offloaded_bytes)} in the host's memory`];
}

function frame(height, top, bottom) {
  const svg = make("svg", {viewBox: `0 0 ${WIDTH} ${height}`, role: "img"});
  const span = view[1] - view[0];
  const rough = span / 8, power = 10 ** Math.floor(Math.log10(rough));
  const tick = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
  for (let s = Math.ceil(view[0] / tick) * tick; s <= view[1] + tick * 1e-6; s += tick) {
    svg.append(make("line", {x1: x(s), x2: x(s), y1: top, y2: bottom, class: "rule"}));
    svg.append(make("text", {x: x(s), y: bottom + 15, "text-anchor": "middle"}, s < tick / 2 ? "0" : seconds(s)));
  }
  borders.forEach((start, number) => {
    if (start < view[0] - 1e-12 || start >= view[1]) return;
    if (number > 0) svg.append(make("line", {x1: x(start), x2: x(start), y1: top - 14, y2: bottom, class: "border"}));
    svg.append(make("text", {x: x(start) + 4, y: top - 5}, numbered(number)));
  });
  return svg;
}

let drawn = [];
function drawTimeline() {
  const top = 22, row = 38, bar = 26, bottom = top + lanes.length * row + 4;
  const svg = frame(bottom + 22, top, bottom);
  const hatch = make("pattern", {id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"},
    make("rect", {width: 6, height: 6, fill: color("wait")}), make("rect", {width: 2, height: 6, fill: "rgb(255 255 255 / 0.45)"}));
  svg.append(make("defs", {}, hatch));
  drawn = [];
  lanes.forEach(([name, kinds], i) => {
    const y = top + i * row + (row - bar) / 2 + 2;
    svg.append(make("text", {x: 0, y: y + bar / 2 + 4, class: "lane"}, name));
    for (const event of events) {
      if (!kinds.includes(event.kind) || event.length <= 0 || event.end <= view[0] || event.start_s >= view[1]) continue;
      const from = Math.max(LEFT, x(event.start_s)), to = Math.min(WIDTH - RIGHT, x(event.end));
      const width = Math.max(to - from, 0.8);
      const rect = make("rect", {x: from, y, width, height: bar, rx: Math.min(2, width / 4), class: `event ${event.kind}`,
        fill: event.kind === "wait" ? "url(#hatch)" : color(event.kind)});
      rect.addEventListener("pointermove", (pointer) => showTip(pointer, describe(event)));
      rect.addEventListener("pointerleave", () => { tip.hidden = true; });
      svg.append(rect);
      drawn.push([event, rect]);
      const letters = Math.floor((width - 8) / 6.2);
      if (letters >= 4 && event.kind !== "wait" && event.kind !== "copy") {
        const label = event.name.length > letters ? `…${event.name.slice(1 - letters)}` : event.name;
        const text = make("text", {x: from + 5, y: y + bar / 2 + 4, class: "inside"}, label);
        svg.append(text);
        drawn.push([event, text]);
      }
    }
  });
  const shown = [["compute", "compute"], ["copy", "copies of parameters and gradients"], ["gather", "all-gather"], ["reduce", "reduce-scatter"],
    ["all-reduce", "all-reduce"], ["offload", "offloaded to the host, and fetched"], ["wait", "exposed communication: compute waits"]].filter(([kind]) => events.some((e) => e.kind === kind));
  byId("timeline").replaceChildren(svg, legend(shown.map(([kind, text]) => [color(kind), text])));
  enlarge(svg);
}

function legend(entries) {
  return make("div", {class: "legend"}, ...entries.map(([fill, text, dashed]) => {
    const style = dashed ? `height:0;border-top:2px ${dashed} ${fill};vertical-align:middle;border-radius:0` : `background:${fill}`;
    const swatch = make("i");
    swatch.style.cssText = style;
    return make("span", {}, swatch, text);
  }));
}

function drawMemory() {
  const top = 22, bottom = 212;
  const svg = frame(bottom + 22, top, bottom);
  const {figures} = data;
  const most = (name) => Math.max(0, ...events.map((event) => event[name]));
  const highest = Math.max(figures.allocated_bytes, most("offloaded_bytes"), figures.eager_peak_bytes, figures.shard_bytes, figures.budget_bytes ?? 0, 1) * 1.06;
  const y = (size) => bottom - size / highest * (bottom - top);
  const unit = 2 ** Math.floor(Math.log2(highest / 3));
  for (let size = 0; size <= highest; size += unit) {
    svg.append(make("line", {x1: LEFT, x2: WIDTH - RIGHT, y1: y(size), y2: y(size), class: "rule"}));
    svg.append(make("text", {x: LEFT - 8, y: y(size) + 4, "text-anchor": "end"}, bytes(size)));
  }
  const clamp = (s) => Math.min(Math.max(x(s), LEFT), WIDTH - RIGHT);
  const steps = (value) => events.map((event, i) => {
    const until = i + 1 < events.length ? events[i + 1].at_s : Math.max(step, event.at_s);
    return `L${clamp(event.at_s)} ${y(value(event))}L${clamp(until)} ${y(value(event))}`;
  }).join("");
  // Stacked from the bottom: each area reaches from 0 to its own bytes and those below it, and is drawn behind them.
  const layers = [["alive_bytes", "gather", "unsharded parameters: gathered buffers, copies and open windows"],
    ["activation_bytes", "compute", "activations, gradients and packs"], ["recomputed_bytes", "all-reduce", "computed again in the backward"]]
    .filter(([name]) => name === "alive_bytes" || events.some((event) => event[name] > 0));
  const upTo = (count) => (event) => layers.slice(0, count).reduce((sum, [name]) => sum + event[name], 0);
  const isOffloading = events.some((event) => event.offloaded_bytes > 0), away = steps((event) => event.offloaded_bytes);
  const eager = steps((event) => event.eager_bytes), base = y(figures.shard_bytes);
  if (events.length > 0) {
    for (let i = layers.length; i > 0; i--) {
      const line = steps(upTo(i)), fill = color(layers[i - 1][1]);
      svg.append(make("path", {d: `M${clamp(0)} ${bottom}${line}L${clamp(end)} ${bottom}Z`, fill: "var(--card, Canvas)", class: "under"}));
      svg.append(make("path", {d: `M${clamp(0)} ${bottom}${line}L${clamp(end)} ${bottom}Z`, fill, "fill-opacity": 0.28, class: i === layers.length ? "area" : "part"}));
      svg.append(make("path", {d: `M${line.slice(1)}`, fill: "none", stroke: fill, "stroke-width": 1.6}));
    }
    svg.append(make("path", {d: `M${eager.slice(1)}`, fill: "none", stroke: "var(--eager)", "stroke-width": 1.5, "stroke-dasharray": "5 4", class: "eager"}));
    if (isOffloading) svg.append(make("path", {d: `M${away.slice(1)}`, fill: "none", stroke: color("offload"), "stroke-width": 1.5, "stroke-dasharray": "2 3", class: "away"}));
  }
  if (figures.budget_bytes !== null) {
    const line = y(figures.budget_bytes);
    svg.append(make("line", {x1: LEFT, x2: WIDTH - RIGHT, y1: line, y2: line, stroke: "var(--exposed)", "stroke-width": 2, class: "budget"}));
  }
  svg.append(make("line", {x1: LEFT, x2: WIDTH - RIGHT, y1: base, y2: base, stroke: "var(--reduce)", "stroke-width": 1.5, "stroke-dasharray": "1.5 3"}));
  svg.addEventListener("pointermove", (pointer) => {
    const at = toSeconds(svg, pointer);
    const event = events.filter((each) => each.at_s <= at).pop();
    if (event === undefined || at < view[0]) return;
    showTip(pointer, [`${seconds(Math.max(at, 0))}: ${event.name} (${event.kind})`, ...layers.map(([name, , text]) => `${bytes(event[name])} ${text}`),
      `${bytes(upTo(layers.length)(event))} in all; unsharded in eager FSDP2, modelled: ${bytes(event.eager_bytes)}`]);
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
  const entries = [...layers.map(([name, kind, text]) => [color(kind), `${text}, at most ${bytes(most(name))}`]),
    ...(isOffloading ? [[color("offload"), `in the host's memory, at most ${bytes(most("offloaded_bytes"))}`, "dotted"]] : []),
    ["var(--eager)", `unsharded parameters of eager FSDP2, a model of it, at most ${bytes(figures.eager_peak_bytes)}`, "dashed"],
    ["var(--reduce)", `sharded baseline, always there: ${bytes(figures.shard_bytes)}`, "dotted"],
    ...(figures.budget_bytes === null ? [] : [["var(--exposed)", `memory budget: ${bytes(figures.budget_bytes)}`, "solid"]])];
  byId("memory").replaceChildren(svg, legend(entries));
  enlarge(svg);
}

function toSeconds(svg, pointer) {
  const box = svg.getBoundingClientRect();
  const position = (pointer.clientX - box.left) / box.width * WIDTH;
  return view[0] + (position - LEFT) / (WIDTH - LEFT - RIGHT) * (view[1] - view[0]);
}

function enlarge(svg) {
  let from = null;
  const inside = (s) => Math.min(Math.max(s, view[0]), view[1]);
  svg.addEventListener("pointerdown", (pointer) => { from = inside(toSeconds(svg, pointer)); });
  svg.addEventListener("pointerup", (pointer) => {
    const to = inside(toSeconds(svg, pointer));
    if (from !== null && Math.abs(x(to) - x(from)) > 8) show([Math.min(from, to), Math.max(from, to)]);
    from = null;
  });
  svg.addEventListener("dblclick", () => show([0, end]));
}

function show(range) {
  view = range;
  tip.hidden = true;
  drawTimeline();
  drawMemory();
  const ranges = [[0, end], ...borders.map((start, i) => [start, borders[i + 1] ?? end])];
  const names = ["all graphs", ...data.figures.graph_s.map((length, i) => `${numbered(i)}, ${seconds(length)}`)];
  byId("zoom").replaceChildren(...ranges.map((each, i) => {
    const button = make("button", {"aria-pressed": each[0] === view[0] && each[1] === view[1]}, names[i]);
    button.addEventListener("click", () => show(each));
    return button;
  }));
  search();
}

// ---- Figures, groups, problems
function drawFigures() {
  const {figures, breaks} = data, recompiles = data.recompiles.reduce((sum, each) => sum + each.times, 0);
  const removed = data.groups.reduce((sum, row) => sum + row.windows_removed, 0);
  const windows = data.groups.reduce((sum, row) => sum + row.windows, 0);
  const share = step > 0 ? Math.round(100 * figures.exposed_s / step) : 0;
  const cards = [[seconds(step), "all graphs, estimated"], [seconds(figures.communication_s), "in collectives"],
    [`${seconds(figures.exposed_s)}`, `exposed communication (${share} %)`],
    [bytes(figures.peak_bytes), `unsharded (eager: ${bytes(figures.eager_peak_bytes)})`],
    [bytes(figures.allocated_bytes), figures.budget_bytes === null ? "allocated at a time" : `allocated, of ${bytes(figures.budget_bytes)}`],
    [`${removed} of ${windows}`, "windows removed"],
    [`${breaks.length} / ${recompiles}`, "graph breaks / recompiles", breaks.length + recompiles > 0]];
  byId("figures").replaceChildren(...cards.map(([value, text, bad]) =>
    make("div", {class: bad ? "figure bad" : "figure"}, make("b", {}, value), make("span", {}, text))));
  const counts = [...new Set(data.graphs.map((g) => g.kind))].map((kind) => `${data.graphs.filter((g) => g.kind === kind).length} ${kind}`).join(" + ");
  byId("title").textContent = data.model;
  byId("subtitle").textContent = `${data.world_size} ranks · ${counts} graphs · torch ${data.torch_version} · compile_fsdp explain`;
}

function drawGroups() {
  const heads = [["group", "tight"], ["unsharded", "number"], ["shards here", "number"], ["gathers", "number"], ["reductions", "number"],
    ["windows removed", "number"], ["windows kept, and why"], ["first use", "tight"], ["last use", "tight"], ["gathered ahead of use", "tight"]];
  const rows = data.groups.map((row) => {
    const {facts} = row;
    const reasons = new Map();
    for (const [fqn, reason] of row.kept) reasons.set(reason, [...(reasons.get(reason) || []), fqn]);
    const kept = [...reasons].map(([reason, fqns]) => make("div", {}, reason, make("small", {}, few([...new Set(fqns)], 4))));
    const times = (which) => row.uses.map((use) => make("div", {}, use[which][0], make("small", {}, `${numbered(use.graph)}, ${seconds(use[which][1])}`)));
    const ahead = row.uses.filter((use) => use.prefetch_events !== null).map((use) =>
      make("div", {}, seconds(use.prefetch_s), make("small", {}, `${numbered(use.graph)}, over ${use.prefetch_events} computations`)));
    const cells = [[facts.name, make("small", {}, `${facts.parameters.length} parameters`)], [bytes(facts.parameter_bytes.reduce((a, b) => a + b, 0))],
      [bytes(facts.shard_bytes)], [row.gathers], [row.reductions], [`${row.windows_removed} of ${row.windows}`],
      kept.length ? kept : ["none"], times("first"), times("last"), ahead.length ? ahead : ["-"]];
    const line = make("tr", {}, ...cells.map((content, i) => make("td", heads[i][1] ? {class: heads[i][1]} : {}, ...content)));
    line.dataset.text = [facts.name, ...facts.parameters, ...reasons.keys()].join(" ");
    return line;
  });
  byId("groups").replaceChildren(make("thead", {}, make("tr", {}, ...heads.map(([name, kind]) => make("th", kind ? {class: kind} : {}, name)))),
    make("tbody", {}, ...rows));
}

function drawChoices() {
  const rows = data.decisions.flatMap((decision) => decision.choices);
  byId("budget").hidden = data.decisions.length === 0;
  const line = (cells, tag) => make("tr", {}, ...cells.map((cell, i) => make(tag, i > 0 ? {class: "number"} : {}, cell)));
  byId("choices").replaceChildren(make("thead", {}, line(["to fit", "costs", "saves"], "th")),
    make("tbody", {}, ...(rows.length ? rows.map((row) => line([row.name, seconds(row.seconds), bytes(row.size)], "td"))
      : [line(["nothing: all of it fits", "", ""], "td")])));
}

function drawBreaks() {
  const problem = (title, place, ...texts) => make("div", {class: "problem"}, make("p", {}, make("b", {}, title)),
    ...texts.filter(Boolean).map((text) => make("p", {}, text)),
    ...(place ? [make("code", {}, `${place.filename}:${place.line}`), make("code", {}, place.source)] : []));
  const all = [...data.breaks.map((each) => problem(`Graph break: ${each.reason}`, each.place, each.explanation, ...each.hints.slice(0, 2))),
    ...data.recompiles.map((each) => problem(`Compiled again${each.times > 1 ? ` ${each.times} times` : ""}: ${each.function}`, each.place, `This guard failed: ${each.reason}`)),
    ...data.notes.map((note) => problem("Note", null, note))];
  byId("breaks").replaceChildren(...(all.length ? all : [make("p", {class: "hint"}, "None: every graph was compiled once, and whole.")]));
}

// ---- Graphs
let chosen = [0, 0];
function drawTabs() {
  byId("tabs").replaceChildren(...data.graphs.map((graph, i) => make("div", {class: "tabs"}, make("span", {}, numbered(i)),
    ...graph.stages.map((stage, j) => {
      const button = make("button", {"aria-pressed": chosen[0] === i && chosen[1] === j}, stage.name);
      button.addEventListener("click", () => { chosen = [i, j]; drawTabs(); search(); });
      return button;
    }))));
}

function marked(sign, text, kind) {
  const line = make("div", kind ? {class: kind} : {}, `${sign} `);
  const lower = text.toLowerCase();
  let from = 0;
  for (let at; query !== "" && (at = lower.indexOf(query, from)) >= 0; from = at + query.length)
    line.append(text.slice(from, at), make("mark", {}, text.slice(at, at + query.length)));
  line.append(text.slice(from));
  return line;
}

function drawDiff() {
  const graph = data.graphs[chosen[0]], around = 3;
  if (graph === undefined) return 0;
  const stage = graph.stages[chosen[1]], whole = byId("whole").checked || stage.edits.length === 1 || query !== "";
  const lines = [];
  let found = 0;
  stage.edits.forEach(([sign, numbers], i) => {
    const kind = {"+": "add", "-": "del"}[sign];
    numbers.forEach((number, j) => {
      const text = graph.lines[number];
      if (query !== "" && !matches(text)) return;
      found++;
      const near = (i > 0 && j < around) || (i + 1 < stage.edits.length && j >= numbers.length - around);
      if (whole || kind || near) lines.push(marked(sign, text, kind));
      else if (j === (i > 0 ? around : 0)) {
        const hidden = numbers.length - (i > 0 ? around : 0) - (i + 1 < stage.edits.length ? around : 0);
        lines.push(make("div", {class: "skip"}, `${hidden} unchanged lines`));
      }
    });
  });
  if (stage.edits.length === 1 && chosen[1] > 0 && query === "") lines.unshift(make("div", {class: "skip"}, "This pass has changed nothing."));
  byId("summary").textContent = stage.summary;
  byId("diff").replaceChildren(...(lines.length ? lines : [make("div", {class: "skip"}, "No line matches.")]));
  return found;
}

drawFigures();
drawGroups();
drawChoices();
drawBreaks();
if (data.graphs.length > 0) chosen = [0, Math.min(1, data.graphs[0].stages.length - 1)];
drawTabs();
byId("search").addEventListener("input", search);
byId("whole").addEventListener("change", drawDiff);
show([0, end]);
