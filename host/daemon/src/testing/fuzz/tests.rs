//! The seeds, and every input that ever found a defect, through the functions that the fuzz targets call.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::*;

type Function = fn(&[u8]) -> bool;

const TARGETS: [(&str, Function); 8] = [
    ("admission", admission),
    ("answers", answers),
    ("api", api),
    ("config", config),
    ("grant", grant),
    ("manifest", manifest),
    ("record", record),
    ("snapshot", snapshot),
];

/// Seeds of a target by their files' names.
fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/seeds")
        .join(target);
    let entries = std::fs::read_dir(&directory)
        .unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let name = |file: &Path| file.file_name().unwrap().to_str().unwrap().to_owned();
    files
        .iter()
        .map(|file| (name(file), std::fs::read(file).unwrap()))
        .collect()
}

/// A seed's name says whether it is refused (`refused-…`) or accepted.
#[test]
fn seeds_satisfy_their_fuzz_target() {
    for (target, function) in TARGETS {
        let seeds = seeds(target);
        for (name, bytes) in &seeds {
            println!("{target}/{name}");
            assert_eq!(
                function(bytes),
                !name.starts_with("refused-"),
                "{target}/{name}: accepted or refused"
            );
        }
        let refused = seeds
            .iter()
            .filter(|(name, _)| name.starts_with("refused-"))
            .count();
        assert!(
            refused > 0 && refused < seeds.len(),
            "{target} has seeds of both kinds"
        );
    }
}

#[test]
fn every_checkpoint_table_has_accepted_seed() {
    let seeds = seeds("record");
    let accepted = |letter| {
        seeds
            .iter()
            .any(|(_, bytes)| bytes.first() == Some(&letter) && record(bytes))
    };
    let mut letters = BTreeSet::new();
    for (table, letter) in nodedock_core::checkpoint::fuzz::letters() {
        assert!(letters.insert(letter), "{table} has another table's letter");
        assert!(accepted(letter), "{table} has no seed");
    }
}

/// A short run of what fuzzing does: the functions get inputs that no seed has.
#[test]
fn mutated_seeds_satisfy_their_target() {
    for (target, function) in TARGETS {
        for (name, bytes) in seeds(target) {
            let step = bytes.len() / 24 + 1;
            for (at, change) in (0..bytes.len())
                .step_by(step)
                .zip([0x01, 0x20, 0x80, 0xff].into_iter().cycle())
            {
                let mut changed = bytes.clone();
                changed[at] ^= change;
                println!("{target}/{name}, byte {at} ^ {change:#x}");
                function(&changed);
                function(&bytes[..at]);
            }
        }
    }
}
