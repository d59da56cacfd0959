// Shows news: when the server says that something changed, the page is fetched again, and what differs takes its place.
// Without this script the pages are the same, and are reloaded by hand.
"use strict";
const main = document.querySelector("main[data-events]");
if (main && window.EventSource) {
  let busy = false, last = main.dataset.now;
  const look = async () => {
    if (busy) return;
    busy = true;
    try {
      while (last !== main.dataset.now) { // what came while a page was fetched counts, too
        const wanted = last, answer = await fetch(location.href, { cache: "no-store" });
        if (!answer.ok) { location.reload(); return; }
        const next = mainOf(await answer.text());
        if (!next.main) return;
        renewPage(main, next.main, next.title);
        if (last === wanted) last = main.dataset.now;
      }
    } catch { /* the room is away: the page stays as it is */ } finally { busy = false; }
  };
  new EventSource(main.dataset.events).onmessage = (event) => { last = event.data; look(); };
}
