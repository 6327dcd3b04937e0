//! Prints answers: tables and text for people, JSON and YAML for scripts. All commands write to standard output and standard error here, so
//! that no text of a driver, a plugin or an API reaches a terminal with unprintable characters.

use std::io::{ErrorKind, Write};

use anyhow::{Context, Result};
use comfy_table::{Table, presets};
use serde::Serialize;

use nodedock_base::printable::is_unprintable;

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

/// A heading, and the cell of a row below it.
pub(super) type Column<R> = (&'static str, fn(&R) -> String);

/// A value that a table shows as a row.
pub(super) trait Row: Sized + 'static {
    const COLUMNS: &'static [Column<Self>];
    /// The columns that are shown unless the form is wide, counted from the left.
    const NARROW: usize = Self::COLUMNS.len();
}

/// Prints `value` as JSON or YAML, or `text` for people.
pub(super) fn print(
    format: Format,
    value: &impl Serialize,
    text: impl FnOnce() -> String,
) -> Result<()> {
    match format {
        Format::Json => print_text(&escaped(
            &serde_json::to_string_pretty(value).context("write JSON")?,
        )),
        Format::Yaml => print_text(
            serde_saphyr::to_string(value)
                .context("write YAML")?
                .trim_end(),
        ),
        Format::Table | Format::Wide => print_text(&text()),
    }
}

/// Returns JSON in which unprintable characters are escaped: they are in strings only, and line feeds are between values only.
fn escaped(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        match is_unprintable(c) && c != '\n' {
            true => c
                .encode_utf16(&mut [0; 2])
                .iter()
                .for_each(|unit| escaped += &format!("\\u{unit:04x}")),
            false => escaped.push(c),
        }
    }
    escaped
}

/// Writes a line to standard error. With standard error closed there is no reader.
pub(super) fn print_error(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{}", printable_lines(text));
}

/// Prints a text to standard output. A reader that closed its end is no error.
pub(super) fn print_text(text: &str) -> Result<()> {
    match writeln!(std::io::stdout().lock(), "{}", printable_lines(text)) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(error).context("write to standard output")
        }
        _ => Ok(()),
    }
}

/// Returns rows as a table, or `none` if there are none.
pub(super) fn table<R: Row>(format: Format, rows: &[R], none: &str) -> String {
    if rows.is_empty() {
        return none.to_owned();
    }
    let columns = if format == Format::Wide {
        R::COLUMNS
    } else {
        &R::COLUMNS[..R::NARROW]
    };
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(columns.iter().map(|(heading, _)| heading));
    for row in rows {
        table.add_row(columns.iter().map(|(_, cell)| printable(&cell(row))));
    }
    table.column_iter_mut().for_each(|column| {
        column.set_padding((0, 3));
    });
    table.trim_fmt()
}

pub(super) fn joined(items: impl IntoIterator<Item = impl ToString>) -> String {
    items
        .into_iter()
        .map(|item| item.to_string())
        .collect::<Vec<_>>()
        .join(",")
}

/// Joins lines, each without unprintable characters.
pub(super) fn join(lines: impl IntoIterator<Item = String>) -> String {
    lines
        .into_iter()
        .map(|line| printable(&line))
        .collect::<Vec<_>>()
        .join("\n")
}

/// Replaces unprintable characters: texts of drivers must not move the terminal's cursor, or hide something.
pub(super) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if is_unprintable(c) { '\u{fffd}' } else { c })
        .collect()
}

/// Replaces unprintable characters except line feeds and tabs.
fn printable_lines(text: &str) -> String {
    text.chars()
        .map(|c| {
            if is_unprintable(c) && !matches!(c, '\n' | '\t') {
                '\u{fffd}'
            } else {
                c
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_seen_is_escaped_in_json_and_replaced_elsewhere() {
        let value = serde_json::json!({"a\u{200b}": "b\u{e0041}\u{9b}\u{feff}é\n"});
        let json = escaped(&serde_json::to_string_pretty(&value).unwrap());
        assert_eq!(
            json,
            "{\n  \"a\\u200b\": \"b\\udb40\\udc41\\u009b\\ufeffé\\n\"\n}"
        );
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&json).unwrap(),
            value
        );
        assert_eq!(
            printable_lines("a\u{1b}\tb\n\u{200f}c\r"),
            "a\u{fffd}\tb\n\u{fffd}c\u{fffd}"
        );
    }

    impl Row for [&'static str; 3] {
        const COLUMNS: &'static [Column<Self>] = &[
            ("NAME", |row| row[0].to_owned()),
            ("STATE", |row| row[1].to_owned()),
            ("REASON", |row| row[2].to_owned()),
        ];
        const NARROW: usize = 2;
    }

    #[test]
    fn a_table_has_aligned_columns_and_no_control_characters() {
        let rows = [["a", "serving", "x"], ["long-name", "\u{1b}[2J", "y"]];
        let narrow = table(Format::Table, &rows, "none");
        assert_eq!(
            narrow,
            "NAME        STATE\na           serving\nlong-name   \u{fffd}[2J"
        );
        assert!(table(Format::Wide, &rows, "none").contains("REASON"));
        assert_eq!(table(Format::Table, &rows[..0], "none"), "none");
    }
}
