"""Names of models and tenants that try to become markup, script or a new line."""

from __future__ import annotations

NAMES = (
    '<img src=x onerror="window.attacked=1">',
    "<script>window.attacked=1</script>",
    '"><svg onload=window.attacked=1>',
    "</td></tr></table><h1>attacked</h1>",
    "javascript:window.attacked=1",
    "{{7*7}}${7*7}",
    "line\nbreak\x1b[31m\u202e",
)
