// --- sections ---------------------------------------------------------------------------------------------------------
function header() {
  byId("title").textContent = content.title;
  byId("kind").textContent = content.folder === content.title ? content.kind : `${content.kind} · ${content.folder}`;
  byId("version").textContent = content.version;
  byId("status").textContent = statusText(content.status);
  byId("progress-body").innerHTML = content.status.under_way.map((run) => `<label><span>${esc(run.name)}</span><span>${run.round}${run.rounds ? ` / ${run.rounds}` : ""}</span>
    <progress max="${run.rounds || 1}" value="${run.rounds ? run.round : 0}"></progress></label>`).join("");
  byId("notes-body").innerHTML = content.notes.map((note) => `<li>${esc(note)}</li>`).join("");
}

function statusText({ finished, failed, runs, under_way: going, interrupted }) {
  const place = (run) => `round ${run ? run.round : 0}${run && run.rounds ? ` of ${run.rounds}` : ""}`;
  if (runs === 1) {
    if (failed) return "failed";
    if (finished) return "finished";
    return interrupted.length ? `interrupted after ${place(interrupted[0])}` : `under way: ${place(going[0])}`;
  }
  if (!failed && finished === runs) return `all ${runs} runs finished`;
  const parts = [[failed, "failed"], [interrupted.length, "interrupted"], [going.length, "under way"]].filter(([n]) => n);
  return [`${finished} of ${runs} runs finished`, ...parts.map(([n, word]) => `${n} ${word}`)].join(", ");
}

function results() {
  const { header: names, rows, caption, notes } = content.table;
  const table = byId("results-table");
  byId("results-about").textContent = caption;
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
  const { lines: every, kinds, spent } = content.bytes;
  const variants = every.filter((v) => !hidden.has(v.label));
  const ways = [...KINDS, ["own", "each method's own prediction"]].filter(([k]) => every.some((v) => v.points.some((p) => p[k] !== null)));
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
  spentChart(byId("cost-spent"), spent[kind === "own" ? Object.keys(spent)[0] : kind] || []);
  const used = kinds.filter((k) => variants.some((v) => v.up[k] || v.down[k]));
  const kb = (v) => (v === null ? "–" : (v / 1000).toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 }));
  fillTable(byId("cost-table"), ["variant", ...used], variants.map((v) => [v.label, ...used.map((k) => `${kb(v.up[k])} / ${kb(v.down[k])}`)]));
}

const runsOf = (parts) => parts.map((p) => [p.run, p.run]);

function clients() {
  const run = choices("clients-run", runsOf(content.clients), clients, content.opens);
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
  const run = choices("classes-run", runsOf(content.classes), classes, content.opens);
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
  const run = choices("space-run", runsOf(content.spaces), spaceSection, content.opens);
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
    const word = by === "class" ? nameOf : (g) => part.clients[g] ?? `client ${g}`;
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

function droppedClients() {
  const counted = (pairs, others) => pairs.map(([name, n]) => `${name} (${n.toLocaleString("en")})`).join(", ") + (others ? ` and ${others} more` : "");
  fillTable(byId("dropped-table"), ["variant", "dropped", "asked", "clients", "why"], content.dropped.map((d) => [
    d.label, d.dropped.toLocaleString("en"), d.asked.toLocaleString("en"), counted(d.sites, d.others), counted(d.reasons, 0)]));
}
