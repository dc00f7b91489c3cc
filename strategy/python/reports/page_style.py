"""The style sheet and the script of a run's report; the palettes are for light and dark pages."""

from __future__ import annotations

_LIGHT = ("#2a6fbb", "#e8912d", "#5aa469", "#b64f8a", "#7d6bb3", "#3c9fb0", "#c2504a", "#8a8f98")
_DARK = ("#6ea8e5", "#f0ae5f", "#84c994", "#d886b5", "#a897dd", "#6fc6d6", "#e5837d", "#a8adb6")

_VARIABLES = {
    "light": "--back:#ffffff;--text:#1c2330;--soft:#5b6472;--edge:#d5dae1;--panel:#f4f6f9;--warn:#fff3dc;",
    "dark": "--back:#14181f;--text:#e6e9ee;--soft:#a3abb8;--edge:#343c48;--panel:#1d232c;--warn:#3a2f17;",
}


def _palette(colors: tuple[str, ...]) -> str:
    return "".join(f"--c{i}:{color};" for i, color in enumerate(colors))


_COLORS = "".join(
    f".b{i}{{background:var(--c{i})}}.f{i}{{fill:var(--c{i})}}.s{i}{{stroke:var(--c{i})}}" for i in range(len(_LIGHT))
)

STYLE = (
    f":root{{color-scheme:light dark;{_VARIABLES['light']}{_palette(_LIGHT)}}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_VARIABLES['dark']}{_palette(_DARK)}}}}}"
    + _COLORS
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif}
header,main{max-width:1080px;margin:auto;padding:0 20px}
h1{font-size:1.5rem;margin:24px 0 0}h2{font-size:1.2rem;margin:36px 0 8px}p{margin:4px 0 12px}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;border-bottom:1px solid var(--edge);padding:8px 0}
nav a{color:var(--c0)}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:10px;margin:12px 0}
dl div{background:var(--panel);border-radius:8px;padding:8px 12px}
dt{color:var(--soft);font-size:.8rem}dd{margin:0;font-size:1.1rem;font-weight:600;overflow-wrap:anywhere}
.warnings{list-style:none;padding:0}.warnings li{background:var(--warn);border-radius:8px;padding:8px 12px;margin:6px 0}
figure{margin:16px 0 24px}figcaption{font-weight:600;margin-bottom:6px}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:.85rem;color:var(--soft);margin-bottom:6px}
.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px}
.legend i.mark{width:2px;border-radius:0;position:static;background:var(--text)}
.plot{position:relative;height:240px;padding-left:76px;margin-top:14px}
.plot svg{width:100%;height:100%;display:block}
.ys span{position:absolute;left:0;width:70px;text-align:right;transform:translateY(-50%);
font-size:.8rem;color:var(--soft)}
.xs{display:flex;justify-content:space-between;gap:8px;padding:4px 0 0 76px;font-size:.8rem;color:var(--soft)}
.grid{stroke:var(--edge);vector-effect:non-scaling-stroke}
.line{fill:none;stroke-width:2;vector-effect:non-scaling-stroke}
.bar{display:grid;grid-template-columns:76px 1fr 90px;gap:8px;align-items:center;margin:3px 0;font-size:.85rem}
.bar b{font-weight:500;color:var(--soft);white-space:nowrap}
.track{position:relative;display:flex;height:20px;background:var(--panel);border-radius:3px}
.track .mark{position:absolute;top:-3px;bottom:-3px;width:2px;background:var(--text)}
.track.time{grid-column:2/4;overflow:hidden}
.time span{position:absolute;top:0;bottom:0;border-right:1px solid var(--back);font-size:.7rem;line-height:20px;
text-align:center;overflow:hidden;color:#10151d}
.ends{grid-column:2/4;display:flex;justify-content:space-between;color:var(--soft)}
.mesh{display:flex;flex-wrap:wrap;gap:12px}
.stage{background:var(--panel);border-radius:8px;padding:10px}
.group{display:flex;flex-wrap:wrap;gap:6px;border:1px solid var(--edge);border-radius:6px;padding:6px;margin-top:6px}
.group span{background:var(--c0);color:var(--back);border-radius:4px;padding:3px 9px;font-size:.85rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem}
th,td{text-align:left;padding:3px 12px 3px 0;border-bottom:1px solid var(--edge);white-space:nowrap}
.facts td{white-space:normal}
input{width:100%;max-width:420px;padding:6px 10px;margin:8px 0;font:inherit;color:inherit;background:var(--panel);
border:1px solid var(--edge);border-radius:6px}
@media(max-width:560px){.bar{grid-template-columns:66px 1fr}.bar>span{grid-column:2}.track.time,.ends{grid-column:2}
.xs span{max-width:5.2em}}
"""
)

SCRIPT = """
const search = document.getElementById("search");
if (search) search.addEventListener("input", () => {
  const words = search.value.toLowerCase().split(/\\s+/).filter(Boolean);
  for (const row of document.querySelectorAll("#parameters tbody tr")) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
  }
});
"""
