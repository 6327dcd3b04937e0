//! Tables for people, JSON and YAML for scripts.

use std::io::{ErrorKind, Write};

use anyhow::{Context, Result};
use comfy_table::{Table, presets};
use serde::Serialize;

/// Form of the output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Format {
    #[default]
    Table,
    /// A table with more columns
    Wide,
    Json,
    Yaml,
}

/// Rows under a heading; columns from `wide_from` on are for the wide form.
pub(super) struct Rows {
    pub(super) heading: Vec<&'static str>,
    pub(super) wide_from: usize,
    pub(super) rows: Vec<Vec<String>>,
}

/// Prints `value` as JSON or YAML, or the rows as a table; `nothing` where there are none.
pub(super) fn print(
    format: Format,
    value: &impl Serialize,
    rows: impl FnOnce() -> Rows,
    nothing: &str,
) -> Result<()> {
    match format {
        Format::Json => say(&serde_json::to_string_pretty(value).context("write JSON")?),
        Format::Yaml => say(serde_saphyr::to_string(value).context("write YAML")?.trim_end()),
        Format::Table | Format::Wide => {
            let rows = rows();
            if rows.rows.is_empty() { say(nothing) } else { say(&table(&rows, format == Format::Wide)) }
        }
    }
}

/// A line, or several, to standard output. A reader that went away is no error.
pub(super) fn say(text: &str) -> Result<()> {
    match writeln!(std::io::stdout().lock(), "{text}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("write to standard output"),
        _ => Ok(()),
    }
}

fn table(rows: &Rows, wide: bool) -> String {
    let columns = if wide { rows.heading.len() } else { rows.wide_from };
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(rows.heading.iter().take(columns).copied());
    for row in &rows.rows {
        table.add_row(row.iter().take(columns).map(|cell| printable(cell)));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 3));
    }
    let lines: Vec<_> = table.to_string().lines().map(|line| line.trim_end().to_owned()).collect();
    lines.join("\n")
}

/// What comes from drivers must not move the terminal's cursor.
pub(super) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_aligned_columns_and_no_control_characters() {
        let rows = Rows {
            heading: vec!["NAME", "STATE", "REASON"],
            wide_from: 2,
            rows: vec![
                vec!["a".into(), "serving".into(), "x".into()],
                vec!["long-name".into(), "\u{1b}[2J".into(), "y".into()],
            ],
        };
        assert_eq!(table(&rows, false), "NAME        STATE\na           serving\nlong-name   \u{fffd}[2J");
        assert!(table(&rows, true).contains("REASON"));
    }
}
