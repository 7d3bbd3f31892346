"use strict";
// Draws what stands in #content. Every function may be called again with newer content: what a person chose is kept.

const byId = (id) => document.getElementById(id);
const esc = (text) => String(text).replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
const KINDS = [["head", "classifier head"], ["prototype", "nearest prototype"]];
const kindsOf = (part) => KINDS.filter(([kind]) => part[kind]); // a method that trains no head has no predictions by it
const DASHES = ["", "6 4", "2 4", "9 3 2 3"];
const hidden = new Set(); // labels of variants that a person switched off
const plots = new Map(); // plot element → how to draw it again
let content = JSON.parse(byId("content").textContent);
let sortBy = { column: -1, down: true };

const seriesColour = (i) => `var(--s${i % 7})`;
const seriesDash = (i) => DASHES[Math.floor(i / 7) % DASHES.length];
const classColour = (c) => `var(--c${((c % 10) + 10) % 10})`;
const indexOf = (label) => content.variants.findIndex((v) => v.label === label);
const shade = (v, both) => {
  const colour = both && v < 0 ? "var(--neg)" : "var(--hi)";
  return `color-mix(in oklab, ${colour} ${Math.round(Math.abs(v) * 20) * 5}%, var(--lo))`;
};
const clamp = (v, low, high) => Math.min(high, Math.max(low, v));
const cut = (name, most) => (name.length > most ? name.slice(0, most - 1) + "…" : name);

function format(value, unit = "") {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  let text;
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) text = value.toExponential(1);
  else text = value.toLocaleString("en", { maximumFractionDigits: unit === "%" ? 2 : size >= 100 ? 0 : size >= 1 ? 2 : 4 });
  return unit ? `${text} ${unit}` : text;
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB"];
  let i = 0;
  while (value >= 1000 && i < 3) { value /= 1000; i += 1; }
  return `${value.toLocaleString("en", { maximumFractionDigits: value >= 100 || i === 0 ? 0 : 1 })} ${units[i]}`;
}

function niceTicks(low, high, count) {
  if (high <= low) return [low];
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((s) => s * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) ticks.push(+(k * step).toPrecision(12));
  return ticks;
}

// --- controls ---------------------------------------------------------------------------------------------------------
function choices(id, options, draw, start) {
  // Fills a select, keeps what was chosen where it is still there, and gives the choice. `start` is chosen at first.
  const select = byId(id);
  const key = JSON.stringify(options);
  if (select.dataset.options !== key) {
    const chosen = select.dataset.options === undefined && start !== undefined ? start : select.value;
    select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
    if (options.some(([value]) => value === chosen)) select.value = chosen;
    select.dataset.options = key;
    select.closest("label").hidden = options.length < 2;
  }
  select.onchange = draw;
  return select.value;
}

function mark(i) {
  return `<svg width="22" height="10" aria-hidden="true"><line x1="1" x2="21" y1="5" y2="5" stroke="${seriesColour(i)}"
    stroke-width="2.5" stroke-dasharray="${seriesDash(i)}"/></svg>`;
}

function legends() {
  // A name for each line; pressing it takes the line out of every chart.
  document.querySelectorAll("[data-legend]").forEach((place) => {
    const key = JSON.stringify(content.variants);
    if (content.variants.length < 2) { place.replaceChildren(); return; }
    if (place.dataset.key !== key) {
      place.dataset.key = key;
      place.replaceChildren(...content.variants.map((variant, i) => {
        const button = document.createElement("button");
        button.type = "button";
        button.innerHTML = mark(i) + esc(variant.label);
        button.onclick = () => {
          if (!hidden.delete(variant.label)) hidden.add(variant.label);
          draw();
        };
        return button;
      }));
    }
    [...place.children].forEach((button, i) => button.setAttribute("aria-pressed", !hidden.has(content.variants[i].label)));
  });
}

// --- a plot: drawn to the width it has, read by pointer and by keys ------------------------------------------------------
const watchSize = new ResizeObserver((entries) => entries.forEach(({ target }) => {
  const width = Math.round(target.clientWidth);
  if (width > 0 && target.dataset.width !== String(width) && plots.has(target)) plots.get(target)();
}));

function plot(place, name, paint, table) {
  // `paint(width)` gives {svg, height, below, pick}; `pick(x, y)` or `pick(null, null, dx, dy)` gives {text, x, y, mark}.
  const svgOf = () => place.querySelector("svg");
  const redraw = () => {
    const width = Math.round(place.clientWidth);
    if (width <= 0) return; // not on show
    place.dataset.width = String(width);
    const made = paint(width);
    let box = place.querySelector(".drawn");
    if (!box) {
      box = document.createElement("div");
      box.className = "drawn";
      place.prepend(box);
    }
    box.innerHTML = `<svg role="img" tabindex="${made.pick ? 0 : -1}" aria-label="${esc(name)}" viewBox="0 0 ${width} ${made.height}"
      height="${made.height}">${made.svg}<g class="over"></g></svg>${made.below || ""}`;
    if (made.pick) reads(svgOf(), made.pick);
  };
  plots.set(place, redraw);
  watchSize.observe(place);
  redraw();
  if (table) asTable(place, table);
}

function reads(svg, pick) {
  const tip = byId("tip");
  const over = svg.querySelector(".over");
  const show = (found, aloud) => {
    if (!found) return leave();
    over.innerHTML = found.mark || "";
    tip.textContent = found.text;
    tip.hidden = false;
    const box = svg.getBoundingClientRect();
    const scale = box.width / svg.viewBox.baseVal.width;
    const left = box.left + found.x * scale;
    const top = box.top + found.y * scale;
    tip.style.left = `${clamp(left + 14 + tip.offsetWidth > innerWidth ? left - 14 - tip.offsetWidth : left + 14, 4, innerWidth - tip.offsetWidth - 4)}px`;
    tip.style.top = `${clamp(top - tip.offsetHeight / 2, 4, innerHeight - tip.offsetHeight - 4)}px`;
    if (aloud) byId("said").textContent = found.text;
  };
  const leave = () => { tip.hidden = true; over.innerHTML = ""; };
  const at = (event) => {
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    show(pick((event.clientX - box.left) * scale, (event.clientY - box.top) * scale));
  };
  svg.onpointermove = at;
  svg.onpointerdown = at;
  svg.onpointerleave = leave;
  svg.onblur = leave;
  svg.onkeydown = (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Escape") leave();
    if (!step) return;
    event.preventDefault();
    show(pick(null, null, ...step), true);
  };
}

function asTable(place, table) {
  // The same numbers for those who would rather read them; made when it is opened.
  let details = place.querySelector("details");
  if (!details) {
    details = document.createElement("details");
    details.className = "data";
    details.innerHTML = `<summary>As a table</summary><div class="scroll" tabindex="0" role="region" aria-label="Numbers of the figure"><table><thead></thead><tbody></tbody></table></div>`;
    place.append(details);
  }
  const fill = () => { if (details.open) fillTable(details.querySelector("table"), ...table()); };
  details.ontoggle = fill;
  fill();
}

function fillTable(table, header, rows) {
  table.tHead.innerHTML = `<tr>${header.map((name) => `<th scope="col">${esc(name)}</th>`).join("")}</tr>`;
  table.tBodies[0].innerHTML = rows
    .map(([first, ...cells]) => `<tr><th scope="row">${esc(first)}</th>${cells.map((c) => `<td>${esc(c ?? "–")}</td>`).join("")}</tr>`)
    .join("");
}

// --- lines ------------------------------------------------------------------------------------------------------------
function lines(place, { name, series, unit = "", log = false, phases = [], height = 260 }) {
  const shown = series.filter((s) => !s.hidden);
  const rounds = [...new Set(shown.flatMap((s) => s.x))].sort((a, b) => a - b);
  const usable = log && shown.every((s) => s.y.every((v) => v > 0));
  let cursor = rounds.length - 1;
  const paint = (width) => {
    if (!rounds.length) return { svg: `<text x="8" y="24">every line is switched off</text>`, height: 40 };
    const tight = width < 420;
    const all = shown.flatMap((s) => (usable ? s.y : [...s.y, ...(s.low || []), ...(s.high || [])]));
    let [low, high] = [Math.min(...all), Math.max(...all)];
    const f = usable ? Math.log10 : (v) => v;
    if (unit === "%") high = Math.min(high, Math.max(100, ...shown.flatMap((s) => s.y)));
    if (!usable && low >= 0 && low < 0.35 * high) low = 0;
    if (high === low) { high += Math.abs(high) * 0.05 || 1; low = usable ? low / 1.1 : low - (Math.abs(low) * 0.05 || 1); }
    const pad = (f(high) - f(low)) * 0.04;
    const [bottom, top] = [f(low) - (low === 0 ? 0 : pad), f(high) + pad];
    let ticks;
    if (usable) {
      ticks = niceTicks(bottom, top, 4).filter((t) => Number.isInteger(t)).map((t) => 10 ** t);
      if (ticks.length < 2) ticks = [...new Set([0, 1, 2, 3].map((k) => +(10 ** (bottom + ((top - bottom) * (k + 0.5)) / 4)).toPrecision(1)))].filter((t) => f(t) >= bottom && f(t) <= top);
    } else ticks = niceTicks(bottom, top, 5);
    const texts = ticks.map((t) => format(t));
    const left = 14 + 6.4 * Math.max(...texts.map((t) => t.length));
    const [right, up, down] = [10, 14, 34];
    const [first, last] = [rounds[0], rounds[rounds.length - 1]];
    const X = (r) => left + ((r - first) / Math.max(last - first, 1)) * (width - left - right);
    const Y = (v) => up + (1 - (f(v) - bottom) / (top - bottom)) * (height - up - down);
    let svg = "";
    phases.forEach((phase, i) => {
      const [from, to] = [X(Math.max(phase.from - 0.5, first)), X(Math.min(phase.to + 0.5, last))];
      if (i % 2 === 0) svg += `<rect class="phase" x="${from}" y="${up}" width="${Math.max(to - from, 1)}" height="${height - up - down}"/>`;
      if (to - from > 50) svg += `<text x="${from + 5}" y="${up + 12}">phase ${esc(phase.name)}</text>`;
    });
    ticks.forEach((t, i) => {
      svg += `<line class="grid" x1="${left}" x2="${width - right}" y1="${Y(t)}" y2="${Y(t)}"/><text x="${left - 6}" y="${Y(t) + 4}" text-anchor="end">${texts[i]}</text>`;
    });
    niceTicks(first, last, tight ? 4 : 6).filter(Number.isInteger).forEach((t) => {
      svg += `<text x="${X(t)}" y="${height - down + 16}" text-anchor="middle">${t}</text>`;
    });
    svg += `<line class="axis" x1="${left}" x2="${width - right}" y1="${height - down}" y2="${height - down}"/>`;
    svg += `<text x="${(left + width - right) / 2}" y="${height - 3}" text-anchor="middle">round</text>`;
    const inside = (v) => clamp(Y(v), up - 4, height - down);
    shown.forEach((s) => {
      if (!s.low || usable) return;
      const over = s.x.map((r, i) => `${X(r).toFixed(1)},${inside(s.high[i]).toFixed(1)}`);
      const under = s.x.map((r, i) => `${X(r).toFixed(1)},${inside(s.low[i]).toFixed(1)}`).reverse();
      svg += `<polygon class="band" fill="${seriesColour(s.index)}" points="${over.concat(under).join(" ")}"/>`;
    });
    shown.forEach((s) => {
      const colour = seriesColour(s.index);
      if (s.x.length === 1) svg += `<circle cx="${X(s.x[0])}" cy="${Y(s.y[0])}" r="4" fill="${colour}"/>`;
      else svg += `<polyline class="line" stroke="${colour}" stroke-dasharray="${seriesDash(s.index)}" points="${s.x.map((r, i) => `${X(r).toFixed(1)},${Y(s.y[i]).toFixed(1)}`).join(" ")}"/>`;
    });
    const pick = (x, y, dx = 0) => {
      if (x === null) cursor = clamp(cursor + dx, 0, rounds.length - 1);
      else {
        const wanted = first + ((x - left) / (width - left - right)) * (last - first);
        cursor = rounds.reduce((best, r, i) => (Math.abs(r - wanted) < Math.abs(rounds[best] - wanted) ? i : best), 0);
      }
      const round = rounds[cursor];
      const here = shown.map((s) => [s, s.x.indexOf(round)]).filter(([, i]) => i >= 0).map(([s, i]) => [s, s.y[i], s.high ? s.high[i] - s.y[i] : null]);
      here.sort((a, b) => b[1] - a[1]);
      const phase = phases.find((p) => p.from <= round && round <= p.to);
      const said = here.map(([s, v, d]) => `${s.label}: ${format(v)}${d === null ? "" : ` ± ${format(d)}`}${unit ? ` ${unit}` : ""}`);
      const text = [`round ${round}${phase ? `, phase ${phase.name}` : ""}`, ...said.slice(0, 14), ...(said.length > 14 ? [`and ${said.length - 14} more`] : [])].join("\n");
      const dots = here.map(([s, v]) => `<circle cx="${X(round)}" cy="${Y(v)}" r="4" fill="${seriesColour(s.index)}" stroke="var(--card)" stroke-width="1.5"/>`);
      return { text, x: X(round), y: here.length ? Y(here[0][1]) : up, mark: `<line class="cursor" x1="${X(round)}" x2="${X(round)}" y1="${up}" y2="${height - down}"/>${dots.join("")}` };
    };
    return { svg, height, pick };
  };
  const table = () => [["round", ...shown.map((s) => s.label)], rounds.map((r) => [r, ...shown.map((s) => (s.x.includes(r) ? format(s.y[s.x.indexOf(r)], unit) : "–"))])];
  const ends = shown.map((s) => `${s.label} ${format(s.y[s.y.length - 1], unit)}`).slice(0, 8).join(", ");
  plot(place, `${name} by round. At the end: ${ends || "nothing"}`, paint, table);
}

const ofVariants = (series) => series.map((s) => ({ ...s, index: indexOf(s.label), hidden: hidden.has(s.label) }));

// --- heat maps --------------------------------------------------------------------------------------------------------
function heat(place, { name, rows, columns, value, text, tip, rowTitle, columnTitle, both = false, scale, square = false }) {
  let cursor = [0, 0];
  const paint = (width) => {
    const longest = Math.max(...rows.map((r) => Math.min(r.length, 16)));
    const left = 26 + 6.4 * longest;
    const roomX = (width - left - 6) / columns.length;
    const upright = Math.max(...columns.map((c) => c.length)) > 3 && Math.max(...columns.map((c) => c.length)) * 6.6 > roomX;
    const w = Math.min(roomX, square ? 40 : 64);
    const h = square ? Math.max(w, 3) : clamp(420 / rows.length, rows.length > 60 ? 5 : 12, 24);
    const below = (upright ? 12 + 6.2 * Math.max(...columns.map((c) => Math.min(c.length, 16))) : 18) + 18;
    const [up, bottom] = [4, 4 + h * rows.length];
    const gap = w > 8 && h > 8 ? 1 : 0;
    const levels = new Map();
    let texts = "";
    rows.forEach((_, r) => columns.forEach((_, c) => {
      const v = value(r, c);
      if (v === null || v === undefined) return;
      const colour = shade(clamp(v, -1, 1), both);
      levels.set(colour, (levels.get(colour) || "") + `M${(left + c * w).toFixed(2)} ${(up + r * h).toFixed(2)}h${(w - gap).toFixed(2)}v${(h - gap).toFixed(2)}h-${(w - gap).toFixed(2)}z`);
      const said = text ? text(r, c) : "";
      if (said && said.length * 6.2 < w - 2 && h >= 12)
        texts += `<text x="${left + (c + 0.5) * w}" y="${up + (r + 0.5) * h + 3.5}" text-anchor="middle" style="font-size:10px;fill:${Math.abs(v) > 0.5 ? "var(--on-hi)" : "var(--ink)"}">${said}</text>`;
    }));
    let svg = [...levels].map(([colour, d]) => `<path style="fill:${colour}" d="${d}"/>`).join("") + texts;
    const everyRow = Math.ceil(13 / h);
    rows.forEach((r, i) => {
      if (i % everyRow === 0) svg += `<text class="name" x="${left - 6}" y="${up + (i + 0.5) * h + 4}" text-anchor="end">${esc(cut(r, 16))}</text>`;
    });
    const everyColumn = Math.ceil((upright ? 13 : 7 * Math.max(...columns.map((c) => c.length)) + 6) / w);
    columns.forEach((c, i) => {
      if (i % everyColumn) return;
      const x = left + (i + 0.5) * w;
      svg += upright
        ? `<text class="name" transform="translate(${x + 4} ${bottom + 8}) rotate(-90)" text-anchor="end">${esc(cut(c, 16))}</text>`
        : `<text class="name" x="${x}" y="${bottom + 15}" text-anchor="middle">${esc(c)}</text>`;
    });
    svg += `<text x="${left + (w * columns.length) / 2}" y="${bottom + below - 5}" text-anchor="middle">${esc(columnTitle)}</text>`;
    svg += `<text transform="translate(11 ${(up + bottom) / 2}) rotate(-90)" text-anchor="middle">${esc(rowTitle)}</text>`;
    const pick = (x, y, dx = 0, dy = 0) => {
      if (x === null) cursor = [clamp(cursor[0] + dy, 0, rows.length - 1), clamp(cursor[1] + dx, 0, columns.length - 1)];
      else {
        const [r, c] = [Math.floor((y - up) / h), Math.floor((x - left) / w)];
        if (r < 0 || c < 0 || r >= rows.length || c >= columns.length) return null;
        cursor = [r, c];
      }
      const [r, c] = cursor;
      return { text: tip(r, c), x: left + (c + 0.5) * w, y: up + (r + 0.5) * h, mark: `<rect class="frame" x="${left + c * w}" y="${up + r * h}" width="${w - gap}" height="${h - gap}"/>` };
    };
    const bar = `<div class="scale" aria-hidden="true"><span>${esc(scale[0])}</span><i class="${both ? "both" : ""}"></i><span>${esc(scale[1])}</span></div>`;
    return { svg, height: bottom + below, pick, below: bar };
  };
  plot(place, name, paint);
}

// --- sections ---------------------------------------------------------------------------------------------------------
function header() {
  byId("title").textContent = content.title;
  byId("kind").textContent = content.kind === "run" ? "Run" : "Comparison";
  byId("version").textContent = content.version;
  const { finished, failed, runs, under_way: going } = content.status;
  byId("status").textContent = failed
    ? (runs === 1 ? "failed" : `${failed} of ${runs} runs failed`)
    : finished === runs
    ? (runs === 1 ? "finished" : `all ${runs} runs finished`)
    : runs === 1 ? `under way: round ${going[0] ? going[0].round : 0}${going[0] && going[0].rounds ? ` of ${going[0].rounds}` : ""}` : `${finished} of ${runs} runs finished`;
  byId("progress-body").innerHTML = going.map((run) => `<label><span>${esc(run.name)}</span><span>${run.round}${run.rounds ? ` / ${run.rounds}` : ""}</span>
    <progress max="${run.rounds || 1}" value="${run.rounds ? run.round : 0}"></progress></label>`).join("");
  byId("notes-body").innerHTML = content.notes.map((note) => `<li>${esc(note)}</li>`).join("");
}

function results() {
  const { header: names, rows, caption, notes } = content.table;
  const table = byId("results-table");
  table.caption.textContent = caption;
  const key = JSON.stringify(names);
  if (table.dataset.key !== key) {
    table.dataset.key = key;
    const row = document.createElement("tr");
    names.forEach((name, i) => {
      const head = document.createElement("th");
      head.scope = "col";
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = name;
      button.onclick = () => {
        sortBy = { column: i, down: sortBy.column === i ? !sortBy.down : i > 0 };
        results();
      };
      head.append(button);
      row.append(head);
    });
    table.tHead.replaceChildren(row);
  }
  [...table.tHead.rows[0].cells].forEach((cell, i) => {
    if (i === sortBy.column) cell.setAttribute("aria-sort", sortBy.down ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  });
  const sorted = [...rows];
  if (sortBy.column >= 0 && sortBy.column < names.length) {
    const i = sortBy.column;
    const sign = sortBy.down ? -1 : 1;
    sorted.sort((a, b) => {
      if (i === 0) return sign * a[0].text.localeCompare(b[0].text);
      const [x, y] = [a[i].value, b[i].value];
      if (x === null || y === null) return (x === null) - (y === null); // what is missing stands last either way
      return sign * (x - y);
    });
  }
  table.tBodies[0].innerHTML = sorted
    .map(([first, ...cells]) => `<tr><th scope="row">${esc(first.text)}</th>${cells.map((c) => `<td class="${c.mark}">${esc(c.text)}</td>`).join("")}</tr>`)
    .join("");
  byId("results-notes").innerHTML = notes.map((note) => `<li>${esc(note)}</li>`).join("");
}

function curves() {
  const charts = content.curves.filter((c) => c.group === "accuracy");
  const loss = content.curves.find((c) => c.group === "loss");
  byId("curves-accuracy").closest("figure").hidden = !charts.length;
  byId("curves-loss").closest("figure").hidden = !loss;
  if (charts.length) {
    const key = choices("curves-measure", charts.map((c) => [c.key, c.title]), curves);
    const chart = charts.find((c) => c.key === key);
    lines(byId("curves-accuracy"), { name: chart.title, series: ofVariants(chart.series), unit: chart.unit });
    const banded = chart.series.some((s) => s.low);
    byId("curves-band").textContent = `${chart.title}${chart.unit ? ` in ${chart.unit}` : ""}, mean over clients${banded ? `; band: ± standard deviation over ${content.band}` : ""}.`;
  }
  if (loss) {
    const log = byId("curves-log");
    log.onchange = curves;
    lines(byId("curves-loss"), { name: "training loss", series: ofVariants(loss.series), log: log.checked });
  }
}

function cost() {
  const { lines: variants, kinds } = content.bytes;
  const ways = [...KINDS, ["own", "each method's own prediction"]].filter(([k]) => variants.some((v) => v.points.some((p) => p[k] !== null)));
  const kind = choices("cost-kind", ways, cost);
  const points = variants.flatMap((v) => v.points.filter((p) => p[kind] !== null).map((p) => ({ x: p.bytes, y: p[kind], label: v.label })));
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  const centres = variants.map((v) => {
    const own = points.filter((p) => p.label === v.label);
    return own.length ? { label: v.label, x: mean(own.map((p) => p.x)), y: mean(own.map((p) => p.y)) } : null;
  }).filter(Boolean);
  let cursor = 0;
  const paint = (width) => {
    if (!points.length) return { svg: "", height: 10 };
    const height = 280;
    const [left, right, up, down] = [46, 20, 14, 36];
    const positive = points.map((p) => p.x).filter((x) => x > 0);
    const none = points.some((p) => p.x === 0);
    let [low, high] = positive.length ? [Math.floor(Math.log10(Math.min(...positive)) * 2) / 2, Math.ceil(Math.log10(Math.max(...positive)) * 2) / 2] : [0, 1];
    if (high - low < 0.5) high = low + 0.5;
    const slot = none ? 84 : 0; // a logarithm has no zero: it stands to the left
    const X = (x) => (x > 0 ? left + slot + ((Math.log10(x) - low) / (high - low)) * (width - left - right - slot) : left + slot / 2);
    const ys = points.map((p) => p.y);
    const room = Math.max((Math.max(...ys) - Math.min(...ys)) * 0.12, 0.5);
    const [bottom, top] = [Math.min(...ys) - room, Math.max(...ys) + room];
    const Y = (y) => up + (1 - (y - bottom) / (top - bottom)) * (height - up - down);
    let svg = "";
    niceTicks(bottom, top, 5).forEach((t) => {
      svg += `<line class="grid" x1="${left}" x2="${width - right}" y1="${Y(t)}" y2="${Y(t)}"/><text x="${left - 6}" y="${Y(t) + 4}" text-anchor="end">${format(t)}</text>`;
    });
    let before = -1e9;
    for (let e = Math.ceil(low - 1e-9); e <= high + 1e-9; e += 1) [1, 3].forEach((m) => {
      const at = m * 10 ** e;
      if (Math.log10(at) > high + 1e-9 || X(at) - before < 52) return;
      before = X(at);
      svg += `<line class="grid" x1="${X(at)}" x2="${X(at)}" y1="${up}" y2="${height - down}"/><text x="${X(at)}" y="${height - down + 16}" text-anchor="middle">${bytes(at)}</text>`;
    });
    if (none) svg += `<text x="${left + slot / 2}" y="${height - down + 16}" text-anchor="middle">none</text>`;
    svg += `<line class="axis" x1="${left}" x2="${width - right}" y1="${height - down}" y2="${height - down}"/><text x="${(left + width) / 2}" y="${height - 3}" text-anchor="middle">bytes a round</text>`;
    svg += points.map((p) => `<circle cx="${X(p.x)}" cy="${Y(p.y)}" r="3" fill="${seriesColour(indexOf(p.label))}" opacity="0.5"/>`).join("");
    const placed = [];
    [...centres].sort((a, b) => b.y - a.y).forEach((c) => {
      const [x, y] = [X(c.x), Y(c.y)];
      svg += `<circle cx="${x}" cy="${y}" r="6.5" fill="${seriesColour(indexOf(c.label))}" stroke="var(--card)" stroke-width="1.5"/>`;
      if (centres.length > 12) return;
      let at = y + 4; // names that would lie on one another move down
      while (placed.some(([px, py]) => Math.abs(px - x) < 90 && Math.abs(py - at) < 13)) at += 3;
      placed.push([x, at]);
      const flip = x > width - 90;
      svg += `<text class="tag" x="${flip ? x - 10 : x + 10}" y="${at}" text-anchor="${flip ? "end" : "start"}">${esc(cut(c.label, 18))}</text>`;
    });
    const pick = (x, y, dx = 0) => {
      if (x === null) cursor = (cursor + dx + centres.length) % centres.length;
      else cursor = centres.reduce((best, c, i) => (Math.hypot(X(c.x) - x, Y(c.y) - y) < Math.hypot(X(centres[best].x) - x, Y(centres[best].y) - y) ? i : best), 0);
      const c = centres[cursor];
      return { text: `${c.label}\n${format(c.y, "%")}\n${bytes(c.x)} a round`, x: X(c.x), y: Y(c.y), mark: `<circle class="frame" cx="${X(c.x)}" cy="${Y(c.y)}" r="8"/>` };
    };
    return { svg, height, pick };
  };
  plot(byId("cost-plot"), `Accuracy against bytes a round: ${centres.map((c) => `${c.label} ${format(c.y, "%")} for ${bytes(c.x)}`).join(", ")}`, paint);
  const used = kinds.filter((k) => variants.some((v) => v.up[k] || v.down[k]));
  const kb = (v) => (v === null ? "–" : (v / 1000).toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 }));
  fillTable(byId("cost-table"), ["variant", ...used], variants.map((v) => [v.label, ...used.map((k) => `${kb(v.up[k])} / ${kb(v.down[k])}`)]));
}

const runsOf = (parts) => parts.map((p) => [p.run, p.run]);

function clients() {
  const run = choices("clients-run", runsOf(content.clients), clients);
  const part = content.clients.find((p) => p.run === run);
  const kind = choices("clients-kind", kindsOf(part), clients);
  const all = part[kind].flat().filter((v) => v !== null);
  all.sort((a, b) => a - b);
  const [least, low, high] = [all[0], all[Math.floor(all.length / 20)], all[all.length - 1]]; // a few bad ones must not take all the shades
  heat(byId("clients-plot"), {
    name: `Accuracy of ${part.names.length} clients at ${part.rounds.length} evaluations, from ${least / 10} to ${high / 10} per cent`,
    rows: part.names, columns: part.rounds.map(String), rowTitle: "client", columnTitle: "round",
    value: (r, c) => (part[kind][r][c] === null ? null : high > low ? Math.max(0, (part[kind][r][c] - low) / (high - low)) : 1),
    text: (r, c) => (part[kind][r][c] === null ? "" : String(Math.round(part[kind][r][c] / 10))),
    tip: (r, c) => `${part.names[r]}\nround ${part.rounds[c]}: ${format(part[kind][r][c] === null ? null : part[kind][r][c] / 10, "%")}`,
    scale: [`${least < low ? "≤ " : ""}${low / 10} %`, `${high / 10} %`],
  });
  const more = part.clients > part.names.length ? `The first ${part.names.length} of ${part.clients} clients. ` : "";
  byId("clients-about").textContent = `${more}A row is a client, a column an evaluation, a shade its accuracy on its own test samples.`;
}

function classes() {
  const run = choices("classes-run", runsOf(content.classes), classes);
  const part = content.classes.find((p) => p.run === run);
  const kinds = kindsOf(part.right);
  const what = choices("classes-show", [["samples", "test samples"], ...kinds.map(([k]) => [k, `share right, by ${k}`])], classes);
  const kind = choices("classes-kind", kinds, classes);
  const most = Math.max(1, ...part.samples.flat());
  const share = (r, c) => (part.samples[r][c] ? part.right[what][r][c] / part.samples[r][c] : null);
  const samples = what === "samples";
  heat(byId("classes-plot"), {
    name: `${samples ? "Test samples" : "Share right"} by client and class, ${part.names.length} clients and ${part.classes.length} classes`,
    rows: part.names, columns: part.classes, rowTitle: "client", columnTitle: "class",
    value: (r, c) => (samples ? (part.samples[r][c] ? Math.sqrt(part.samples[r][c] / most) : null) : share(r, c)),
    text: (r, c) => (!part.samples[r][c] ? "" : samples ? String(part.samples[r][c]) : String(Math.round(100 * share(r, c)))),
    tip: (r, c) => `${part.names[r]}, class ${part.classes[c]}\n${part.samples[r][c]} test samples${part.samples[r][c] ? `\n${kinds.map(([k, n]) => `${part.right[k][r][c]} right by ${n}`).join("\n")}` : ""}`,
    scale: samples ? ["1", String(most)] : ["0 %", "100 %"],
  });
  const more = part.clients > part.names.length ? `The first ${part.names.length} of ${part.clients} clients. ` : "";
  byId("classes-about").textContent = `${more}Round ${part.round}; empty where a client has no test samples of a class.`;
  const size = part.classes.length;
  const counts = Array.from({ length: size }, () => new Array(size).fill(0));
  part.confusion[kind].forEach(([t, p, n]) => { counts[t][p] = n; });
  const totals = counts.map((row) => row.reduce((a, b) => a + b, 0));
  const right = counts.reduce((sum, row, i) => sum + row[i], 0) / Math.max(1, totals.reduce((a, b) => a + b, 0));
  heat(byId("classes-confusion"), {
    name: `Confusion matrix of all clients together, ${format(100 * right, "%")} right`,
    rows: part.classes, columns: part.classes, rowTitle: "true", columnTitle: "taken for", square: true,
    value: (r, c) => (counts[r][c] ? counts[r][c] / totals[r] : null),
    text: (r, c) => (counts[r][c] ? String(counts[r][c]) : ""),
    tip: (r, c) => `${part.classes[r]} taken for ${part.classes[c]}\n${counts[r][c]} of ${totals[r]}`,
    scale: ["0 %", "100 %"],
  });
}

// --- the embedding space ------------------------------------------------------------------------------------------------
const STAR = Array.from({ length: 10 }, (_, i) => {
  const [r, a] = [i % 2 ? 0.42 : 1, (Math.PI * i) / 5 - Math.PI / 2];
  return [r * Math.cos(a), r * Math.sin(a)];
});
let player = 0;

function spaceSection() {
  const run = choices("space-run", runsOf(content.spaces), spaceSection);
  const by = choices("space-colour", [["class", "class"], ["client", "client"]], spaceSection);
  const part = content.spaces.find((p) => p.run === run);
  const frames = part.frames;
  const slider = byId("space-round");
  const atEnd = slider.dataset.run === undefined || +slider.value >= +slider.max; // who looks at the newest goes on doing so
  slider.max = String(frames.length - 1);
  if (atEnd) slider.value = slider.max;
  slider.dataset.run = run;
  slider.disabled = frames.length < 2;
  byId("space-play").hidden = frames.length < 2;
  slider.oninput = frame;
  byId("space-play").onclick = () => {
    if (player) return stop();
    if (+slider.value >= +slider.max) slider.value = "0";
    byId("space-play").textContent = "Pause";
    frame();
    player = setInterval(() => {
      if (+slider.value >= +slider.max) return stop();
      slider.value = String(+slider.value + 1);
      frame();
    }, 500);
  };
  function stop() {
    clearInterval(player);
    player = 0;
    byId("space-play").textContent = "Play";
  }
  const nameOf = (c) => part.names[c] ?? String(c);
  function frame() {
    const shown = frames[clamp(+slider.value, 0, frames.length - 1)];
    const y = shown.y ?? frames[0].y;
    const client = shown.client ?? frames[0].client;
    byId("space-out").textContent = `round ${shown.round}`;
    slider.setAttribute("aria-valuetext", `round ${shown.round}`);
    const group = by === "class" ? y : client;
    const groups = [...new Set(group)].sort((a, b) => a - b);
    const stars = [];
    for (let i = 0; i < shown.stars.length; i += 4) stars.push(shown.stars.slice(i, i + 4));
    plot(byId("space-plot"), `Embedding space in round ${shown.round}: ${group.length} samples as dots, ${stars.length} prototypes as stars`, (width) => {
      const side = Math.min(width, 560);
      const [left, pad] = [(width - side) / 2, 14];
      const X = (x) => left + pad + (x / 1000) * (side - 2 * pad);
      const Y = (v) => side - pad - (v / 1000) * (side - 2 * pad);
      const paths = new Map(groups.map((g) => [g, ""]));
      group.forEach((g, i) => paths.set(g, paths.get(g) + `M${X(shown.points[2 * i]).toFixed(1)} ${Y(shown.points[2 * i + 1]).toFixed(1)}h0`));
      let svg = `<rect x="${left + 0.5}" y="0.5" width="${side - 1}" height="${side - 1}" rx="4" fill="none" class="axis"/>`;
      svg += [...paths].map(([g, d]) => `<path class="dots" stroke="${classColour(g)}" d="${d}"/>`).join("");
      const size = stars.length > 60 ? 6 : 9;
      svg += stars.map(([x, v, c]) => `<polygon class="star" fill="${by === "class" ? classColour(c) : "var(--ink)"}" points="${STAR.map(([a, b]) => `${(X(x) + size * a).toFixed(1)},${(Y(v) + size * b).toFixed(1)}`).join(" ")}"/>`).join("");
      if (stars.length <= 40) svg += stars.map(([x, v, c]) => `<text class="tag" x="${X(x) + 10}" y="${Y(v) + 4}">${esc(cut(nameOf(c), 14))}</text>`).join("");
      let cursor = 0;
      const pick = (px, py, dx = 0) => {
        if (!stars.length) return null;
        if (px === null) cursor = (cursor + dx + stars.length) % stars.length;
        else cursor = stars.reduce((best, s, i) => (Math.hypot(X(s[0]) - px, Y(s[1]) - py) < Math.hypot(X(stars[best][0]) - px, Y(stars[best][1]) - py) ? i : best), 0);
        const [x, v, c, bank] = stars[cursor];
        if (px !== null && Math.hypot(X(x) - px, Y(v) - py) > 24) return null;
        return { text: `prototype of ${nameOf(c)}${part.banks > 1 ? `, bank ${bank}` : ""}`, x: X(x), y: Y(v), mark: `<circle class="frame" cx="${X(x)}" cy="${Y(v)}" r="12"/>` };
      };
      return { svg, height: side, pick };
    });
    const few = groups.length <= 30 ? groups : [];
    const word = by === "class" ? nameOf : (g) => `client ${g}`;
    byId("space-legend").innerHTML = few.map((g) => `<span><svg width="10" height="10" aria-hidden="true"><circle cx="5" cy="5" r="4.5" fill="${classColour(g)}"/></svg>${esc(word(g))}</span>`).join("");
    const matrix = shown.similarity;
    byId("space-similarity").closest("figure").hidden = !frames.some((f) => f.similarity && f.similarity.length > 1);
    byId("space-similarity").hidden = !matrix;
    if (matrix && matrix.length) {
      const names = matrix.map((_, c) => nameOf(c));
      heat(byId("space-similarity"), {
        name: `Cosine between the prototypes of ${matrix.length} classes in round ${shown.round}`,
        rows: names, columns: names, rowTitle: "class", columnTitle: "class", square: true, both: true,
        value: (r, c) => (matrix[r][c] === null ? null : matrix[r][c] / 100),
        text: (r, c) => (matrix[r][c] === null ? "" : String(matrix[r][c]).replace("-", "−")),
        tip: (r, c) => `${names[r]} and ${names[c]}\ncosine ${matrix[r][c] === null ? "–" : (matrix[r][c] / 100).toFixed(2)}`,
        scale: ["−1", "1"],
      });
    }
    byId("space-similarity-about").textContent = matrix
      ? `Cosine between prototypes, in hundredths, round ${shown.round}${part.banks > 1 ? `; mean of ${part.banks} banks` : ""}.`
      : "With this many classes the matrix is of the last snapshot only.";
  }
  byId("space-about").textContent = `${part.about}. Dots are samples, stars prototypes; axes are the same in every round.`;
  frame();
}

// --- the rest -----------------------------------------------------------------------------------------------------------
function smallCharts(id, charts) {
  const place = byId(id);
  const key = JSON.stringify(charts.map((c) => c.key));
  if (place.dataset.key !== key) {
    place.dataset.key = key;
    place.innerHTML = charts.map((c) => `<figure><h3>${esc(c.title)}${c.unit ? ` (${c.unit})` : ""}</h3><div class="plot"></div></figure>`).join("");
  }
  charts.forEach((c, i) => lines(place.children[i].querySelector(".plot"), { name: c.title, series: ofVariants(c.series), unit: c.unit, height: 200 }));
}

function schedule() {
  const richest = content.terms.reduce((best, t) => (t.series.length + t.phases.length > best.series.length + best.phases.length ? t : best)).label;
  const chosen = choices("schedule-variant", content.terms.map((t) => [t.label, t.label]), schedule, richest);
  const part = content.terms.find((t) => t.label === chosen);
  lines(byId("schedule-plot"), { name: `loss terms of ${chosen}`, series: part.series.map((s, i) => ({ ...s, index: i })), phases: part.phases });
  byId("schedule-legend").innerHTML = part.series.map((s, i) => `<span>${mark(i)}${esc(s.label)}</span>`).join("");
  byId("schedule-about").textContent = `Loss terms of ${chosen} with their weights in them${part.series.some((s) => s.low) ? "; band: ± standard deviation over seeds" : ""}${part.phases.length > 1 ? `; ${part.phases.length} phases, of the first seed` : ""}.`;
}

function settings() {
  const { shared, differ, labels, seeds } = content.settings;
  byId("settings-differ-box").hidden = !differ.length;
  fillTable(byId("settings-differ"), ["setting", ...labels], differ);
  byId("settings-summary").textContent = `${shared.length} settings${differ.length ? " that all runs share" : ""}`;
  fillTable(byId("settings-shared"), ["setting", "value"], shared);
  byId("settings-seeds").textContent = seeds.length ? `Seeds: ${seeds.join(", ")}.` : "";
  byId("versions").innerHTML = content.versions.map((v) => `<li>${esc(v.text)}${content.versions.length > 1 ? ` (${v.runs} runs)` : ""}</li>`).join("");
}

const SECTIONS = [
  ["progress", "Under way", () => content.status.under_way.length, () => {}],
  ["notes", "Missing", () => content.notes.length, () => {}],
  ["results", "Results", () => content.table.rows.length && content.table.header.length > 1, results],
  ["curves", "Curves", () => content.curves.some((c) => c.group !== "silhouette"), curves],
  ["cost", "Bytes", () => content.bytes.lines.length, cost],
  ["clients", "Clients", () => content.clients.length, clients],
  ["classes", "Classes", () => content.classes.length, classes],
  ["space", "Space", () => content.spaces.length, spaceSection],
  ["silhouette", "Silhouette", () => content.curves.some((c) => c.group === "silhouette"), () => smallCharts("silhouette-body", content.curves.filter((c) => c.group === "silhouette"))],
  ["schedule", "Terms", () => content.terms.some((t) => t.series.length), schedule],
  ["measures", "Measures", () => content.measures.length, () => smallCharts("measures-body", content.measures)],
  ["settings", "Settings", () => true, settings],
];

function draw() {
  header();
  legends();
  const shown = SECTIONS.filter(([id, , there]) => {
    const is = Boolean(there());
    byId(id).hidden = !is;
    return is;
  });
  const links = shown.map(([id, name]) => `<li><a href="#${id}">${name}</a></li>`).join("");
  if (byId("sections").dataset.key !== links) {
    byId("sections").dataset.key = links;
    byId("sections").innerHTML = links;
  }
  shown.forEach(([, , , fill]) => fill());
}

function themes() {
  const names = { "": "Theme: system", light: "Theme: light", dark: "Theme: dark" };
  const order = Object.keys(names);
  const root = document.documentElement;
  const button = byId("theme");
  const show = (theme) => {
    if (theme) root.dataset.theme = theme;
    else delete root.dataset.theme;
    button.textContent = names[theme];
  };
  let stored = "";
  try { stored = localStorage.getItem("protofed-theme") || ""; } catch { /* a browser may refuse storage to local files */ }
  show(order.includes(stored) ? stored : "");
  button.onclick = () => {
    const next = order[(order.indexOf(root.dataset.theme || "") + 1) % order.length];
    show(next);
    try { localStorage.setItem("protofed-theme", next); } catch { /* then it is not remembered */ }
  };
}

async function follow() {
  // Asks for newer content until the server is gone; the page stays as it is meanwhile.
  let tag = "";
  let failures = 0;
  for (;;) {
    await new Promise((done) => setTimeout(done, document.hidden ? 10000 : 2000));
    try {
      const answer = await fetch("content.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      failures = 0;
      if (answer.status === 200) {
        tag = answer.headers.get("ETag") || "";
        content = await answer.json();
        draw();
      }
    } catch {
      failures += 1;
      if (failures === 3) byId("status").textContent += " – the live view has been stopped";
    }
  }
}

themes();
draw();
if (LIVE) follow();
