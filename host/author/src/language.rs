//! Languages of drivers: the template of each, and how it is recognised.

use std::path::Path;

use anyhow::{Context, Result, bail};
use nodedock_base::file;

/// A language in which a driver is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Language {
    Rust,
    Go,
    Python,
    #[value(name = "js", alias = "javascript")]
    JavaScript,
    C,
}

/// The file that shows the language of a directory.
const MARKS: [(&str, Language); 5] = [
    ("Cargo.toml", Language::Rust),
    ("go.mod", Language::Go),
    ("driver.py", Language::Python),
    ("driver.js", Language::JavaScript),
    ("driver.c", Language::C),
];

impl Language {
    /// Finds the language of a directory by its files.
    pub(super) fn of_directory(directory: &Path) -> Result<Self> {
        let entries = std::fs::read_dir(directory)
            .with_context(|| format!("read {}", directory.display()))?;
        drop(entries);
        let mut found = Vec::new();
        for mark in &MARKS {
            if file::is_file(&directory.join(mark.0))? {
                found.push(mark);
            }
        }
        match found.as_slice() {
            [(_, language)] => Ok(*language),
            [] => {
                let names = MARKS.map(|(name, _)| name).join(", ");
                bail!(
                    "{} has no driver's sources: none of {names} is there",
                    directory.display()
                )
            }
            [(one, _), (other, _), ..] => {
                bail!(
                    "{} has both {one} and {other}: choose with --lang",
                    directory.display()
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn language_follows_from_the_one_source() {
        let directory = tempfile::tempdir().unwrap();
        let of = || Language::of_directory(directory.path());
        let none = of().unwrap_err().to_string();
        assert!(
            none.contains("none of Cargo.toml, go.mod, driver.py"),
            "{none}"
        );
        std::fs::write(directory.path().join("driver.c"), "").unwrap();
        assert_eq!(of().unwrap(), Language::C);
        std::fs::write(directory.path().join("driver.py"), "").unwrap();
        let two = of().unwrap_err().to_string();
        assert!(
            two.contains("both driver.py and driver.c: choose with --lang"),
            "{two}"
        );
        let missing = Language::of_directory(&directory.path().join("nothing"))
            .unwrap_err()
            .to_string();
        assert!(
            missing.contains("read ") && missing.contains("nothing"),
            "{missing}"
        );
    }
}
