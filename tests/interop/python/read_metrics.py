"""Reads OpenMetrics text of a file with Prometheus' own parser; writes each family to standard output, one line each."""

import sys

from prometheus_client.openmetrics.parser import text_string_to_metric_families


def main() -> None:
    for family in text_string_to_metric_families(open(sys.argv[1], encoding="utf-8").read()):
        print(family.type, family.name, len(family.samples))


if __name__ == "__main__":
    main()
