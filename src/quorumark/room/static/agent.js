// Loads the page anew when something changed, unless a person is about to press a button.
"use strict";
const main = document.querySelector("main[data-events]");
async function look() {
  try {
    const answer = await fetch(main.dataset.events, { cache: "no-store" });
    if (!answer.ok) return;
    const busy = document.activeElement && document.activeElement.tagName === "BUTTON";
    if (await answer.text() !== main.dataset.now && !busy) location.reload();
  } catch { /* the agent is away: the page stays as it is */ }
}
if (main) { look(); setInterval(look, 1500); }
