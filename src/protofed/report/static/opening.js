// --- what the page opens with -------------------------------------------------------------------------------------------
const MOST_NAMED = 30; // sites that have a line and a name each; more are drawn as sorted curves

function verdict() {
  const { sentences, gains } = content.verdict;
  byId("verdict-first").textContent = sentences[0];
  byId("verdict-more").innerHTML = sentences.slice(1).map((s) => `<li>${esc(s)}</li>`).join("");
  const kinds = KINDS.filter(([kind]) => gains[kind]);
  byId("verdict-plot").closest("figure").hidden = !kinds.length;
  if (!kinds.length) return;
  const kind = choices("verdict-kind", kinds, verdict, Object.keys(gains)[0]);
  const part = gains[kind];
  const shown = part.lines.filter((line) => !hidden.has(line.label)).map((line) => ({ ...line, index: indexOf(line.label) }));
  const named = part.sites.length <= MOST_NAMED;
  plot(byId("verdict-plot"), gainsName(part, kind), (width) => (named ? gainsByName : gainsSorted)(part.sites, shown, width),
    () => [["site", ...part.lines.map((l) => l.label)], part.sites.map((site, i) => [site, ...part.lines.map((l) => signed(l.values[i]))])]);
  const many = part.of > part.sites.length ? `The first ${part.sites.length} of ${part.of} sites. ` : "";
  const order = named ? `sorted by what ${part.first} gains` : "each variant sorted from its largest gain to its largest loss";
  byId("verdict-about").textContent = `${many}Gain over Local in points, site by site, by ${kind}, mean over seeds; ${order}. Right of the line, or above it, a site is better off than alone.`;
}

const signed = (v) => (v === null || v === undefined ? "–" : (v > 0 ? "+" : v < 0 ? "−" : "") + Math.abs(v).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 }));

function gainsName(part, kind) {
  const words = part.lines.map((l) => `${l.label} ${signed(l.mean)} on average, better at ${l.values.filter((v) => v > 0).length} of ${l.values.filter((v) => v !== null).length}`);
  return `Gain over Local by ${kind} at ${part.sites.length} sites: ${words.join("; ")}`;
}

function gainRange(lines) {
  const all = lines.flatMap((l) => l.values).filter((v) => v !== null);
  const [low, high] = [Math.min(0, ...all), Math.max(0, ...all)];
  const pad = Math.max((high - low) * 0.06, 0.2);
  return [low - pad, high + pad];
}

function gainsByName(sites, lines, width) {
  const room = nameRoom(sites, width);
  const left = room.left - 10;
  const [right, up, h] = [16, 6, Math.max(20, 13 * room.tallest + 4)];
  const bottom = up + h * sites.length;
  const [low, high] = gainRange(lines);
  const X = (v) => left + ((v - low) / (high - low)) * (width - left - right);
  let svg = niceTicks(low, high, width < 420 ? 4 : 8).map((t) => `<line class="grid" x1="${X(t)}" x2="${X(t)}" y1="${up}" y2="${bottom}"/><text x="${X(t)}" y="${bottom + 15}" text-anchor="middle">${signed(t).replace(/\.00$/, "")}</text>`).join("");
  sites.forEach((_, i) => {
    const y = up + (i + 0.5) * h;
    svg += `<line class="grid" x1="${left}" x2="${width - right}" y1="${y}" y2="${y}"/>${nameText(room.lines[i], left - 6, y)}`;
  });
  svg += `<line class="zero" x1="${X(0)}" x2="${X(0)}" y1="${up - 4}" y2="${bottom + 3}"/>`;
  svg += `<text x="${(left + width - right) / 2}" y="${bottom + 31}" text-anchor="middle">gain over Local, points</text>`;
  const place = (i, k) => up + (i + 0.5) * h + (lines.length > 1 ? (k / (lines.length - 1) - 0.5) * Math.min(h - 12, 3 * lines.length) : 0);
  lines.forEach((l, k) => l.values.forEach((v, i) => {
    if (v !== null) svg += `<circle cx="${X(v).toFixed(1)}" cy="${place(i, k).toFixed(1)}" r="4.5" fill="${seriesColour(l.index)}" stroke="var(--card)"/>`;
  }));
  let cursor = -1;
  const pick = (x, y, dx = 0, dy = 0) => {
    cursor = x === null ? clamp(cursor + dx + dy, 0, sites.length - 1) : Math.floor((y - up) / h);
    if (cursor < 0 || cursor >= sites.length) return null;
    const text = [sites[cursor], ...lines.map((l) => `${l.label}: ${signed(l.values[cursor])}`)].join("\n");
    return { text, x: x === null ? X(0) : x, y: up + (cursor + 0.5) * h, mark: `<rect class="frame" x="${left}" y="${up + cursor * h}" width="${width - left - right}" height="${h}"/>` };
  };
  return { svg, height: bottom + 36, pick };
}

function gainsSorted(sites, lines, width) {
  const height = 300;
  const [left, right, up, down] = [52, 12, 10, 36];
  const [low, high] = gainRange(lines);
  const sorted = lines.map((l) => ({ ...l, order: l.values.map((v, i) => [v, i]).filter(([v]) => v !== null).sort((a, b) => b[0] - a[0]) }));
  const most = Math.max(2, ...sorted.map((l) => l.order.length));
  const X = (i) => left + (i / (most - 1)) * (width - left - right);
  const Y = (v) => up + (1 - (v - low) / (high - low)) * (height - up - down);
  let svg = niceTicks(low, high, 6).map((t) => `<line class="grid" x1="${left}" x2="${width - right}" y1="${Y(t)}" y2="${Y(t)}"/><text x="${left - 6}" y="${Y(t) + 4}" text-anchor="end">${signed(t).replace(/\.00$/, "")}</text>`).join("");
  svg += `<line class="zero" x1="${left}" x2="${width - right}" y1="${Y(0)}" y2="${Y(0)}"/>`;
  niceTicks(1, most, 6).filter(Number.isInteger).forEach((t) => { svg += `<text x="${X(t - 1)}" y="${height - down + 16}" text-anchor="middle">${t}</text>`; });
  svg += `<text x="${(left + width - right) / 2}" y="${height - 3}" text-anchor="middle">sites, the largest gain first</text>`;
  sorted.forEach((l) => {
    svg += `<polyline class="line thin" stroke="${seriesColour(l.index)}" points="${l.order.map(([v], i) => `${X(i).toFixed(1)},${Y(v).toFixed(1)}`).join(" ")}"/>`;
    svg += l.order.map(([v], i) => `<circle cx="${X(i).toFixed(1)}" cy="${Y(v).toFixed(1)}" r="2.5" fill="${seriesColour(l.index)}"/>`).join("");
  });
  let cursor = -1;
  const pick = (x, y, dx = 0) => {
    cursor = clamp(x === null ? cursor + dx : Math.round(((x - left) / (width - left - right)) * (most - 1)), 0, most - 1);
    const here = sorted.filter((l) => l.order[cursor]);
    if (!here.length) return null;
    const text = [`site ${cursor + 1} of ${most} by its gain`, ...here.map((l) => `${l.label}: ${signed(l.order[cursor][0])} at ${sites[l.order[cursor][1]]}`)].join("\n");
    return { text, x: X(cursor), y: Y(here[0].order[cursor][0]), mark: `<line class="cursor" x1="${X(cursor)}" x2="${X(cursor)}" y1="${up}" y2="${height - down}"/>` };
  };
  return { svg, height, pick };
}

// --- what bytes bought --------------------------------------------------------------------------------------------------
function spentChart(place, lines) {
  // Accuracy against the bytes of all rounds up to it. What sends nothing is a level line.
  const all = lines.filter((l) => !hidden.has(l.label)).map((l) => ({ ...l, index: indexOf(l.label) }));
  const shown = all.filter((l) => l.x.length);
  const levels = all.filter((l) => !l.x.length);
  place.closest("figure").hidden = !lines.some((l) => l.x.length);
  const points = shown.flatMap((l) => l.x.map((x, i) => ({ x, y: l.y[i], l, i }))).filter((p) => p.x > 0);
  let cursor = 0;
  const paint = (width) => {
    if (!points.length) return { svg: `<text x="8" y="24">every line is switched off</text>`, height: 40 };
    const height = 280;
    const [left, right, up, down] = [46, 20, 14, 36];
    const [low, high] = [Math.log10(Math.min(...points.map((p) => p.x))), Math.log10(Math.max(...points.map((p) => p.x))) + 0.02];
    const ys = [...points.map((p) => p.y), ...levels.map((l) => l.level)];
    const room = Math.max((Math.max(...ys) - Math.min(...ys)) * 0.06, 0.5);
    const [bottom, top] = [Math.min(...ys) - room, Math.max(...ys) + room];
    const X = (x) => left + ((Math.log10(x) - low) / Math.max(high - low, 0.1)) * (width - left - right);
    const Y = (y) => up + (1 - (y - bottom) / (top - bottom)) * (height - up - down);
    let svg = niceTicks(bottom, top, 5).map((t) => `<line class="grid" x1="${left}" x2="${width - right}" y1="${Y(t)}" y2="${Y(t)}"/><text x="${left - 6}" y="${Y(t) + 4}" text-anchor="end">${format(t)}</text>`).join("");
    let before = -1e9;
    for (let e = Math.floor(low); e <= high; e += 1) [1, 3].forEach((m) => {
      const at = m * 10 ** e;
      if (Math.log10(at) < low || Math.log10(at) > high || X(at) - before < 56) return;
      before = X(at);
      svg += `<line class="grid" x1="${X(at)}" x2="${X(at)}" y1="${up}" y2="${height - down}"/><text x="${X(at)}" y="${height - down + 16}" text-anchor="middle">${bytes(at)}</text>`;
    });
    svg += `<line class="axis" x1="${left}" x2="${width - right}" y1="${height - down}" y2="${height - down}"/><text x="${(left + width) / 2}" y="${height - 3}" text-anchor="middle">bytes since the first round, up and down</text>`;
    levels.forEach((l) => {
      svg += `<line class="line" stroke="${seriesColour(l.index)}" stroke-dasharray="3 4" x1="${left}" x2="${width - right}" y1="${Y(l.level)}" y2="${Y(l.level)}"/><text class="tag" x="${left + 4}" y="${Y(l.level) - 5}">${esc(cut(l.label, 18))}, sends nothing</text>`;
    });
    shown.forEach((l) => {
      const d = l.x.map((x, i) => [x, l.y[i]]).filter(([x]) => x > 0).map(([x, y]) => `${X(x).toFixed(1)},${Y(y).toFixed(1)}`);
      svg += d.length > 1 ? `<polyline class="line" stroke="${seriesColour(l.index)}" stroke-dasharray="${seriesDash(l.index)}" points="${d.join(" ")}"/>` : `<circle cx="${d[0].split(",")[0]}" cy="${d[0].split(",")[1]}" r="4" fill="${seriesColour(l.index)}"/>`;
    });
    const pick = (x, y, dx = 0) => {
      const far = (p) => Math.hypot(X(p.x) - x, Y(p.y) - y);
      cursor = x === null ? clamp(cursor + dx, 0, points.length - 1) : points.reduce((best, p, i) => (far(p) < far(points[best]) ? i : best), 0);
      const p = points[cursor];
      return { text: `${p.l.label}, round ${p.l.rounds[p.i]}\n${format(p.y, "%")}\n${bytes(p.x)} so far`, x: X(p.x), y: Y(p.y), mark: `<circle class="frame" cx="${X(p.x)}" cy="${Y(p.y)}" r="6"/>` };
    };
    return { svg, height, pick };
  };
  const reached = (l, level) => { const i = l.y.findIndex((y) => y >= level); return i < 0 ? "not reached" : bytes(l.x[i]); };
  const table = () => {
    const ys = points.map((p) => p.y);
    return [["bytes to reach", ...shown.map((l) => l.label)], niceTicks(Math.min(...ys), Math.max(...ys), 8).map((t) => [format(t, "%"), ...shown.map((l) => reached(l, t))])];
  };
  plot(place, `Accuracy against all bytes sent: ${shown.map((l) => `${l.label} ${format(l.y[l.y.length - 1], "%")} for ${bytes(l.x[l.x.length - 1])}`).join(", ")}`, paint, points.length ? table : undefined);
}

// --- tables that are wider than the page --------------------------------------------------------------------------------
function scrollHints() {
  document.querySelectorAll(".scroll").forEach((box) => {
    if (!box.dataset.hinted) {
      box.dataset.hinted = "yes";
      const hint = document.createElement("p");
      hint.className = "hint";
      hint.textContent = "More columns: scroll sideways →";
      hint.hidden = true;
      box.before(hint);
      box.addEventListener("scroll", () => showHint(box), { passive: true });
      new ResizeObserver(() => showHint(box)).observe(box);
      new ResizeObserver(() => showHint(box)).observe(box.firstElementChild);
    }
    showHint(box);
  });
}

function showHint(box) {
  const more = box.scrollWidth - box.clientWidth > 2;
  box.dataset.more = String(more && box.scrollLeft + box.clientWidth < box.scrollWidth - 2);
  box.previousElementSibling.hidden = !more;
}
