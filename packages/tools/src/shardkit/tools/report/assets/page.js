"use strict";
// Every text comes from the report and goes into the page as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#b07aa1", "#9c755f"];
const byId = (id) => document.getElementById(id);

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function bytes(value) {
  let amount = value;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(amount) < 1024) return `${amount.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    amount /= 1024;
  }
  return `${amount.toFixed(2)} TiB`;
}

function seconds(value) {
  if (Math.abs(value) >= 1) return `${value.toFixed(2)} s`;
  if (Math.abs(value) >= 1e-3 || value === 0) return `${(value * 1e3).toFixed(1)} ms`;
  return `${(value * 1e6).toFixed(0)} us`;
}

// Rows are texts by column: those of the first of `all`, but for the `hidden` one.
function fillTable(table, rows, hidden, all = rows) {
  const columns = Object.keys(all[0] ?? {}).filter((name) => name !== hidden);
  const line = (tag, texts) => {
    const made = element("tr");
    made.append(...texts.map((text) => element(tag, text)));
    return made;
  };
  table.replaceChildren(line("th", columns), ...rows.map((row) => line("td", columns.map((name) => row[name]))));
}

function options(select, entries) {
  select.replaceChildren(...entries.map(([value, text]) => {
    const option = element("option", text);
    option.value = value;
    return option;
  }));
}

// Marks of an axis of bytes are whole KiB, MiB or GiB.
const POWERS = Array.from({ length: 52 }, (_, power) => 2 ** power);

function axes(format, xFormat) {
  const ink = getComputedStyle(document.documentElement).getPropertyValue("--soft").trim();
  const grid = getComputedStyle(document.documentElement).getPropertyValue("--line").trim();
  const line = { space: 80, stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
  return [
    { ...line, values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : xFormat(tick))) },
    {
      ...line, space: 40, size: 72, ...(format === bytes ? { incrs: POWERS } : {}),
      values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : format(tick))),
    },
  ];
}

const charts = new Map();

function draw(id, make) {
  const place = byId(id);
  const redraw = () => {
    charts.get(id)?.destroy();
    charts.set(id, make(place, Math.max(280, place.clientWidth)));
  };
  redraw();
  return redraw;
}

// -- memory ------------------------------------------------------------------------------------------------------------

const hidden = new Set();

function memoryOf() {
  return data.memory.find((one) => String(one.rank) === byId("memory-rank").value);
}

function memoryChart(place, width) {
  const memory = memoryOf();
  const levels = memory[byId("memory-by").value];
  const names = Object.keys(levels);
  const drawn = names.filter((name) => !hidden.has(name));
  const color = (name) => COLORS[names.indexOf(name) % COLORS.length];
  const sums = memory.times.map(() => 0);
  const stacked = drawn.map((name) => levels[name].map((value, i) => (sums[i] += value)));
  const stepped = uPlot.paths.stepped({ align: 1 });
  // The largest sum is drawn first, so that what lies below it covers it.
  const series = drawn.map((name) => ({
    label: name.replaceAll("_", " "), stroke: color(name), fill: color(name), paths: stepped, points: { show: false },
    value: (u, value, index, at) => (at === null ? "-" : bytes(levels[name][at])),
  })).reverse();
  const resident = byId("resident").checked ? [{
    label: "resident", stroke: "#888", width: 1.5, dash: [4, 3], points: { show: false },
    value: (u, value) => (value === null ? "-" : bytes(value)),
  }] : [];
  byId("peak").textContent = memory.peak;
  return new uPlot(
    {
      width, height: 300, scales: { x: { time: false }, y: { range: (u, low, high) => [0, high * 1.05 || 1] } },
      axes: axes(bytes, seconds),
      series: [{ label: "time", value: (u, value) => (value === null ? "-" : seconds(value)) }, ...series, ...resident],
    },
    [memory.times, ...stacked.reverse(), ...(resident.length ? [memory.resident] : [])], place);
}

// One box for each category, or module, of the memory chart.
function memoryFilters(redraw) {
  const names = Object.keys(memoryOf()[byId("memory-by").value]);
  byId("parts").replaceChildren(...names.map((name, index) => {
    const label = element("label");
    const box = element("input");
    box.type = "checkbox";
    box.checked = !hidden.has(name);
    box.dataset.part = name;
    box.addEventListener("change", () => {
      if (box.checked) hidden.delete(name); else hidden.add(name);
      redraw();
    });
    const swatch = element("i", "", "swatch");
    swatch.style.background = COLORS[index % COLORS.length];
    label.append(box, swatch, name.replaceAll("_", " "));
    return label;
  }));
}

// -- exposed communication ---------------------------------------------------------------------------------------------

function matches(module, phase) {
  const part = byId("module-filter").value.toLowerCase();
  const wanted = byId("phase-filter").value;
  return module.toLowerCase().includes(part) && (wanted === "" || wanted === phase);
}

function exposedBars() {
  const rank = byId("exposed-rank").value;
  const byModule = new Map();
  for (const one of data.exposed) {
    if (String(one.rank) !== rank || !matches(one.module, one.phase)) continue;
    const sum = byModule.get(one.module) ?? { seconds: 0, skew: 0 };
    sum.seconds += one.seconds;
    sum.skew += one.skew;
    byModule.set(one.module, sum);
  }
  const rows = [...byModule].sort((one, other) => other[1].seconds - one[1].seconds);
  const most = Math.max(1e-9, ...rows.map(([, sum]) => sum.seconds));
  byId("exposed").replaceChildren(...rows.map(([module, sum]) => {
    const bar = element("div", undefined, "bar");
    const track = element("span", undefined, "track");
    const skew = element("i", "", "skew");
    const rest = element("i");
    skew.style.width = `${(100 * sum.skew) / most}%`;
    rest.style.width = `${(100 * (sum.seconds - sum.skew)) / most}%`;
    track.append(skew, rest);
    bar.append(element("span", module, "name"), track, element("span", seconds(sum.seconds), "value"));
    return bar;
  }));
  if (!rows.length) byId("exposed").append(element("p", "Nothing that fits the filters waited.", "empty"));
}

function collectivesTable() {
  const rows = data.collectives.filter((one) => matches(one.of, one.phase) || matches(one["waited by"], one.phase));
  fillTable(byId("collectives"), rows, "waited by", data.collectives);
}

function applyFilters() {
  exposedBars();
  collectivesTable();
}

// -- ranks -------------------------------------------------------------------------------------------------------------

function stepsChart(place, width) {
  const series = data.ranks.map((one, index) => ({
    label: `rank ${one.rank}`, stroke: COLORS[index % COLORS.length], width: 1.5,
    value: (u, value) => (value === null ? "-" : seconds(value)),
  }));
  const numbers = data.steps[0].map((_, index) => index);
  return new uPlot(
    { width, height: 220, scales: { x: { time: false } }, axes: axes(seconds, (tick) => (Number.isInteger(tick) ? `step ${tick}` : "")),
      series: [{ label: "step" }, ...series] },
    [numbers, ...data.steps], place);
}

function latenessChart(place, width) {
  const numbers = data.ranks.map((one) => Number(one.rank));
  return new uPlot(
    { width, height: 200, axes: axes(seconds, (tick) => (numbers.includes(tick) ? `rank ${tick}` : "")),
      scales: { x: { time: false, range: [numbers[0] - 0.5, numbers[numbers.length - 1] + 0.5] }, y: { range: (u, low, high) => [0, high || 1e-3] } },
      series: [{ label: "rank" }, {
        label: "late by", stroke: "#d9822b", fill: "#d9822b", paths: uPlot.paths.bars({ size: [0.6, 80] }),
        points: { show: false }, value: (u, value) => (value === null ? "-" : seconds(value)),
      }] },
    [numbers, data.lateness], place);
}

// -- page --------------------------------------------------------------------------------------------------------------

function estimateTable() {
  if (!data.predictions.length) {
    byId("estimate").append(element("p", "No estimate stands beside this run; give one with --estimate.", "empty"));
    return;
  }
  const table = element("table");
  fillTable(table, data.predictions, "bars");
  table.rows[0].append(element("th", "predicted above measured"));
  data.predictions.forEach((one, index) => {
    const cell = table.rows[index + 1].insertCell();
    one.bars.forEach((share, which) => {
      const bar = element("i", "", which ? "pair measured" : "pair");
      bar.style.width = `${100 * share}%`;
      cell.append(bar);
    });
  });
  byId("estimate").append(table);
}

function ownedTable() {
  fillTable(byId("owned"), data.owned[byId("owner").selectedIndex]);
}

function ownerTables() {
  byId("owners-section").hidden = !data.owners.length;
  if (!data.owners.length) return;
  fillTable(byId("owners"), data.owners, "largest");
  options(byId("owner"), data.owners.map((one) => [one.rank, one.rank]));
  byId("owner").addEventListener("change", ownedTable);
  ownedTable();
}

function fillPage() {
  byId("run").textContent = data.run;
  byId("command").textContent = data.command;
  data.notes.forEach((note) => byId("notes").append(element("p", note, "empty")));
  data.figures.forEach((one) => {
    const box = element("div", undefined, "figure");
    box.title = one.meaning;
    box.append(element("b", one.value), element("span", one.name.replaceAll("_", " ")));
    byId("figures").append(box);
  });
  options(byId("memory-rank"), data.memory.map((one) => [one.rank, one.rank]));
  options(byId("exposed-rank"), data.ranks.map((one) => [one.rank, one.rank]));
  options(byId("phase-filter"), [["", "all"], ...data.phases.map((name) => [name, name])]);
  fillTable(byId("ranks"), data.ranks);
  fillTable(byId("modules"), data.modules);
  ownerTables();
  estimateTable();
}

fillPage();
const redrawMemory = draw("memory", memoryChart);
const redrawSteps = draw("steps", stepsChart);
const redrawLateness = draw("lateness", latenessChart);
memoryFilters(redrawMemory);
applyFilters();
for (const id of ["memory-rank", "memory-by"]) {
  byId(id).addEventListener("change", () => {
    memoryFilters(redrawMemory);
    redrawMemory();
  });
}
byId("resident").addEventListener("change", redrawMemory);
byId("module-filter").addEventListener("input", applyFilters);
byId("phase-filter").addEventListener("change", applyFilters);
byId("exposed-rank").addEventListener("change", exposedBars);
let width = document.body.clientWidth;
window.addEventListener("resize", () => {
  if (document.body.clientWidth === width) return;  // a phone's address bar changes the height only
  width = document.body.clientWidth;
  redrawMemory();
  redrawSteps();
  redrawLateness();
});
