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

function wrapped(name, most) {
  // The name in lines of at most so many letters, broken between words where it can be.
  const lines = [];
  name.split(" ").forEach((word) => {
    const last = lines.length - 1;
    if (last >= 0 && lines[last].length + 1 + word.length <= most) { lines[last] += ` ${word}`; return; }
    for (let i = 0; i < Math.max(word.length, 1); i += most) lines.push(word.slice(i, i + most));
  });
  return lines;
}

function nameRoom(names, width) {
  // The room that names need at the left of a figure, and each name in lines: in full, and never more than half the width.
  const most = Math.max(8, Math.floor((0.5 * width - 26) / 6.4));
  const lines = names.map((name) => wrapped(name, most));
  const longest = Math.max(1, ...lines.flat().map((line) => line.length));
  return { left: 26 + 6.4 * longest, lines, tallest: Math.max(1, ...lines.map((l) => l.length)) };
}

const nameText = (lines, x, y) => `<text class="name" y="${y + 4 - 6 * (lines.length - 1)}" text-anchor="end">${lines
  .map((line, i) => `<tspan x="${x}" dy="${i ? 12 : 0}">${esc(line)}</tspan>`).join("")}</text>`;

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
    [...place.children].forEach((button, i) => {
      button.setAttribute("aria-pressed", !hidden.has(content.variants[i].label));
      button.hidden = place.dataset.legend === "gains" && content.variants[i].method === "local"; // it is the line at 0
    });
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
    const room = nameRoom(square ? rows.map((r) => cut(r, 16)) : rows, width);
    const { left } = room;
    const roomX = (width - left - 6) / columns.length;
    const upright = Math.max(...columns.map((c) => c.length)) > 3 && Math.max(...columns.map((c) => c.length)) * 6.6 > roomX;
    const w = Math.min(roomX, square ? 40 : 64);
    const least = rows.length > 60 ? 5 : 12 * room.tallest;
    const h = square ? Math.max(w, 3) : clamp(420 / rows.length, least, Math.max(24, least));
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
      if (i % everyRow === 0) svg += nameText(room.lines[i], left - 6, up + (i + 0.5) * h);
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
