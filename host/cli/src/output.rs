//! Tables of the values that commands print.

pub(crate) use nodedock_command::output::{
    Column, Format, join, joined, print, print_error, print_text, printable,
};

/// A value that a table shows as a row.
pub(crate) trait Row: Sized + 'static {
    const COLUMNS: &'static [Column<Self>];
    /// The columns that are shown unless the form is wide, counted from the left.
    const NARROW: usize = Self::COLUMNS.len();
}

/// Returns rows as a table, or `none` if there are none.
pub(crate) fn table<R: Row>(format: Format, rows: &[R], none: &str) -> String {
    nodedock_command::output::table(format, R::COLUMNS, R::NARROW, rows, none)
}
