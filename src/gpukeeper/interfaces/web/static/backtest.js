// The slider of the backtest page. The page works without it: its table has every point.
"use strict";

{
  const slider = document.getElementById("limit-window");
  const select = document.getElementById("limit-threshold");
  const answer = document.getElementById("limit-answer");
  const windows = [...document.querySelectorAll("#limit-windows option")];
  const [onlyWindow, onlyThreshold] = answer.dataset.point.split("/");

  function choose() {
    const chosen = slider ? windows[slider.value] : null;
    const point = (chosen ? chosen.dataset.seconds : onlyWindow) + "/" + (select ? select.value : onlyThreshold);
    if (chosen) {
      slider.setAttribute("aria-valuetext", chosen.label);
      document.getElementById("limit-words").textContent = chosen.label;
    }
    for (const one of document.querySelectorAll("tr[data-point], circle[data-point]")) {
      const isChosen = one.dataset.point === point;
      one.classList.toggle("chosen", isChosen);
      if (isChosen && one.dataset.sentence) answer.textContent = one.dataset.sentence;
    }
  }

  if (slider || select) {
    for (const one of [slider, select]) if (one) one.addEventListener("input", choose);
    document.getElementById("limit").hidden = false;
    choose();
  }
}
