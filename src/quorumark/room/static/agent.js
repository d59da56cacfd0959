// Shows news: when something changed, the page is fetched again and what differs takes its place, unless a person is about
// to press a button. What matters of it is said to screen readers.
"use strict";
const main = document.querySelector("main[data-events]");
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
    const next = mainOf(await page.text());
    if (!next.main || busy()) return;
    renewPage(main, next.main, next.title);
  } catch { /* the agent is away: the page stays as it is */ }
}
if (main) { look(); setInterval(look, 1500); }
