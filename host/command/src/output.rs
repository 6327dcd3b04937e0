//! Prints answers: tables and text for people, JSON and YAML for scripts. All commands write to standard output and standard error here, so
//! that no text of a driver, a plugin or an API reaches a terminal with unprintable characters.

use std::io::{ErrorKind, Write};

use anyhow::{Context, Result};
use serde::Serialize;
use unicode_width::UnicodeWidthStr;

use nodedock_base::printable::is_unprintable;

/// Columns of a terminal between those of a table.
const GAP: usize = 3;

/// Form of the output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    #[default]
    Table,
    /// A table with more columns
    Wide,
    Json,
    Yaml,
}

/// A heading, and the cell of a row below it.
pub type Column<R> = (&'static str, fn(&R) -> String);

/// Prints `value` as JSON or YAML, or `text` for people.
pub fn print(format: Format, value: &impl Serialize, text: impl FnOnce() -> String) -> Result<()> {
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
pub fn print_error(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{}", printable_lines(text));
}

/// Prints a text to standard output. A reader that closed its end is no error.
pub fn print_text(text: &str) -> Result<()> {
    match writeln!(std::io::stdout().lock(), "{}", printable_lines(text)) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(error).context("write to standard output")
        }
        _ => Ok(()),
    }
}

/// Returns rows as a table, or `none` if there are none. Unless the form is wide, it has the `narrow` columns from the left.
pub fn table<R>(
    format: Format,
    columns: &[Column<R>],
    narrow: usize,
    rows: &[R],
    none: &str,
) -> String {
    if rows.is_empty() {
        return none.to_owned();
    }
    let columns = if format == Format::Wide {
        columns
    } else {
        &columns[..narrow.min(columns.len())]
    };
    let headings = columns.iter().map(|(heading, _)| (*heading).to_owned());
    let lines = std::iter::once(headings.collect::<Vec<_>>());
    let lines = lines.chain(rows.iter().map(|row| cells(columns, row)));
    aligned(&lines.collect::<Vec<_>>())
}

fn cells<R>(columns: &[Column<R>], row: &R) -> Vec<String> {
    columns
        .iter()
        .map(|(_, cell)| printable(&cell(row)))
        .collect()
}

/// Joins lines of cells so that each column is as wide on a terminal as its widest cell.
fn aligned(lines: &[Vec<String>]) -> String {
    let mut widths = Vec::new();
    for line in lines {
        widths.resize(line.len().max(widths.len()), 0);
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = cell.width().max(*width);
        }
    }
    let padded = lines.iter().map(|line| {
        let mut text = String::new();
        for (cell, width) in line.iter().zip(&widths) {
            text.push_str(cell);
            text.extend(std::iter::repeat_n(' ', width - cell.width() + GAP));
        }
        text.truncate(text.trim_end().len());
        text
    });
    padded.collect::<Vec<_>>().join("\n")
}

/// Joins items by commas.
pub fn joined(items: impl IntoIterator<Item = impl ToString>) -> String {
    items
        .into_iter()
        .map(|item| item.to_string())
        .collect::<Vec<_>>()
        .join(",")
}

/// Joins lines, each without unprintable characters.
pub fn join(lines: impl IntoIterator<Item = String>) -> String {
    lines
        .into_iter()
        .map(|line| printable(&line))
        .collect::<Vec<_>>()
        .join("\n")
}

/// Replaces unprintable characters: texts of drivers must not move the terminal's cursor, or hide something.
pub fn printable(text: &str) -> String {
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
    fn invisible_characters_are_escaped_or_replaced() {
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

    const COLUMNS: [Column<[&str; 3]>; 3] = [
        ("NAME", |row| row[0].to_owned()),
        ("STATE", |row| row[1].to_owned()),
        ("REASON", |row| row[2].to_owned()),
    ];

    #[test]
    fn table_is_aligned_and_printable() {
        let rows = [["a", "serving", "x"], ["long-name", "\u{1b}[2J", "y"]];
        let narrow = table(Format::Table, &COLUMNS, 2, &rows, "none");
        assert_eq!(
            narrow,
            "NAME        STATE\na           serving\nlong-name   \u{fffd}[2J"
        );
        assert!(table(Format::Wide, &COLUMNS, 2, &rows, "none").contains("REASON"));
        assert_eq!(
            table(Format::Table, &COLUMNS, 2, &rows[..0], "none"),
            "none"
        );
    }

    #[test]
    fn cells_are_aligned_by_display_width() {
        let rows = [["装置", "a", ""], ["x", "", ""]];
        assert_eq!(
            table(Format::Wide, &COLUMNS, 2, &rows, "none"),
            "NAME   STATE   REASON\n装置   a\nx"
        );
    }
}
