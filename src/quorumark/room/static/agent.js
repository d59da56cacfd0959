// Shows news: when something changed, the page is fetched again and what differs takes its place, unless a person is about
// to press a button. What matters of it is said to screen readers.
"use strict";
const main = document.querySelector("main[data-events]");
const news = document.getElementById("news");
function busy() {
  const now = document.activeElement;
  return now && main.contains(now) && ["BUTTON", "INPUT", "SELECT"].includes(now.tagName);
}
async function look() {
  try {
    const answer = await fetch(main.dataset.events, { cache: "no-store" });
    if (!answer.ok || await answer.text() === main.dataset.now || busy()) return;
    const page = await fetch(location.href, { cache: "no-store" });
    if (!page.ok) { location.reload(); return; }
    const next = new DOMParser().parseFromString(await page.text(), "text/html");
    const fresh = next.querySelector("main");
    if (!fresh || busy()) return;
    main.querySelectorAll("details").forEach((one, index) => {
      const same = fresh.querySelectorAll("details")[index];
      if (same && one.open) same.open = true;
    });
    const say = (fresh.querySelector("[data-say]") || { dataset: {} }).dataset.say || "";
    const said = (main.querySelector("[data-say]") || { dataset: {} }).dataset.say || "";
    main.replaceChildren(...fresh.childNodes);
    main.dataset.now = fresh.dataset.now;
    document.title = next.title;
    if (news && say && say !== said) news.textContent = say;
  } catch { /* the agent is away: the page stays as it is */ }
}
if (main) { look(); setInterval(look, 1500); }
