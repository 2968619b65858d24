// Two conveniences; every page works without them: parts that change are fetched again, and arrow keys turn pages.
"use strict";

const live = document.getElementById("live");
if (live) {
  const refresh = async () => {
    if (live.querySelector("[data-done]")) return;
    if (!document.hidden) {
      try {
        const answer = await fetch(live.dataset.live);
        if (answer.ok) live.innerHTML = await answer.text(); // this server's own HTML, escaped there
      } catch {
        // the server is gone; it may come back
      }
    }
    setTimeout(refresh, Number(live.dataset.every));
  };
  setTimeout(refresh, Number(live.dataset.every));
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, video, audio, pre")) return;
  if (event.key === "/") {
    const search = document.querySelector("input[type=search]");
    if (search) {
      search.focus();
      event.preventDefault();
    }
    return;
  }
  const rel = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  const link = rel && document.querySelector(`a[rel=${rel}]`);
  if (link) link.click();
});

// A picture that can't be drawn says so in words.
document.addEventListener("error", (event) => {
  if (event.target.tagName !== "IMG") return;
  const text = document.createElement("span");
  text.className = "broken";
  text.textContent = `no picture: ${event.target.alt}`;
  event.target.replaceWith(text);
}, true);
