// --- the page -----------------------------------------------------------------------------------------------------------
const SECTIONS = [
  ["verdict", "Verdict", () => content.verdict.sentences.length, verdict],
  ["progress", "Under way", () => content.status.under_way.length, () => {}],
  ["notes", "Missing", () => content.notes.length, () => {}],
  ["results", "Results", () => content.table.rows.length && content.table.header.length > 1, results],
  ["curves", "Curves", () => content.curves.some((c) => c.group !== "silhouette"), curves],
  ["cost", "Bytes", () => content.bytes.lines.length, cost],
  ["dropped", "Dropped", () => content.dropped.length, droppedClients],
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
  scrollHints();
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
