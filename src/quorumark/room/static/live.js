// Shows news: when the server says that something changed, the page is loaded anew in the background, and the part that
// differs takes its place. Without this script the pages are the same, and are reloaded by hand.
"use strict";
const main = document.querySelector("main[data-events]");
if (main && window.EventSource) {
  let busy = false;
  const news = new EventSource(main.dataset.events);
  news.onmessage = async (event) => {
    if (event.data === main.dataset.now) return;
    if (busy || (document.activeElement && main.contains(document.activeElement)
        && ["INPUT", "TEXTAREA"].includes(document.activeElement.tagName))) return;
    busy = true;
    try {
      const answer = await fetch(location.href, { cache: "no-store" });
      if (!answer.ok) { location.reload(); return; }
      const next = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
      if (next) {
        for (const one of next.querySelectorAll("details[id]")) {
          const before = document.getElementById(one.id);
          if (before && before.open) one.open = true;
        }
        main.replaceChildren(...next.childNodes);
        main.dataset.now = next.dataset.now;
      }
    } finally { busy = false; }
  };
}
