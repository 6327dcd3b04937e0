//! Replaces what identifies a machine in a snapshot. Pure.
//!
//! Two passes: the first finds the values, in the order of the paths; the second replaces them in contents, in paths and in targets of
//! links, since the same serial number or address is in several files, and in names such as `enx3cfdfea1b2c3`.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};

use crate::collect::Collector;
use crate::identifiers::{
    is_hardware_address, is_identifier, is_particular, is_value, placeholder, text, values_in,
    values_of_lines,
};
use crate::{Entry, Snapshot};

/// Bytes of the name of a machine from which on it is replaced.
const NAME_BYTES_MIN: usize = 4;

/// What was replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Redacted {
    /// Different values that have a placeholder.
    pub values: usize,
    /// Files in which at least one was replaced.
    pub files: usize,
    /// Entries that are left out, because with the placeholder they have another entry's path.
    pub dropped: usize,
}

pub(crate) fn redact(snapshot: Snapshot, known: &[String]) -> (Snapshot, Redacted) {
    let mut placeholders = Placeholders::default();
    for (path, entry) in snapshot.entries() {
        if let Entry::File(content) = entry
            && let Some(text) = text(content)
        {
            values(path, text).into_iter().for_each(|range| placeholders.add(&text[range]));
        }
    }
    placeholders.add_known(known, &snapshot);
    let replacer = Replacer::new(placeholders);
    let mut redacted = Redacted { values: replacer.placeholders.len(), ..Redacted::default() };
    let mut collector = Collector::default();
    for (path, entry) in snapshot.entries {
        let entry = match entry {
            Entry::File(content) => {
                let replaced = replacer.file(&path, &content);
                redacted.files += usize::from(replaced != content);
                Entry::File(replaced)
            }
            Entry::Link(target) => Entry::Link(replacer.name(&target)),
            other => other,
        };
        let path = replacer.name(&path);
        let segments: Vec<_> = path.split('/').filter(|segment| !segment.is_empty()).collect();
        redacted.dropped += usize::from(collector.add(&segments, entry).is_err());
    }
    (collector.into_snapshot(), redacted)
}

/// Values and their placeholders, without what all of a kind begin with.
#[derive(Default)]
struct Placeholders {
    by_value: HashMap<String, String>,
    addresses: usize,
    others: usize,
    /// Names of the machine: replaced as whole words in contents, whatever they look like.
    names: HashSet<String>,
}

impl Placeholders {
    /// A name that is also that of an entry, such as a driver's, says nothing about the machine elsewhere.
    fn add_known(&mut self, known: &[String], snapshot: &Snapshot) {
        let is_entry =
            |name: &str| snapshot.entries.keys().any(|path| path.split('/').any(|segment| segment == name));
        for name in known.iter().map(|name| name.trim()) {
            if name.len() >= NAME_BYTES_MIN && is_value(name) && !is_entry(name) {
                self.add(name);
                self.names.insert(name.to_ascii_lowercase());
            }
        }
    }

    fn add(&mut self, value: &str) {
        let key = value.to_ascii_lowercase();
        if self.by_value.contains_key(&key) {
            return;
        }
        let count = if is_hardware_address(value) { &mut self.addresses } else { &mut self.others };
        *count += 1;
        let placeholder = placeholder(value, *count);
        self.by_value.insert(key, placeholder);
    }
}

/// Returns where a file has identifiers.
fn values(path: &str, text: &str) -> Vec<Range<usize>> {
    if is_identifier(path) { values_of_lines(text) } else { values_in(text) }
}

/// A text that is replaced wherever it occurs.
struct Occurrence {
    placeholder: String,
    /// Not within a longer word or number.
    is_word: bool,
    /// Also in paths and targets of links.
    is_in_names: bool,
}

struct Replacer {
    placeholders: HashMap<String, String>,
    searched: AhoCorasick,
    occurrences: Vec<Occurrence>,
}

impl Replacer {
    fn new(placeholders: Placeholders) -> Self {
        let mut texts = Vec::new();
        let mut occurrences = Vec::new();
        let mut values: Vec<_> = placeholders.by_value.iter().collect();
        values.sort();
        for (value, placeholder) in values {
            let is_name = placeholders.names.contains(value);
            if is_particular(value) || is_name {
                texts.push(value.clone());
                let placeholder = placeholder.clone();
                occurrences.push(Occurrence { placeholder, is_word: true, is_in_names: !is_name });
            }
            // As in the name of a network interface.
            if is_hardware_address(value) {
                texts.push(value.replace(':', ""));
                let placeholder = placeholder.replace(':', "");
                occurrences.push(Occurrence { placeholder, is_word: false, is_in_names: true });
            }
        }
        let searched = AhoCorasick::builder()
            .ascii_case_insensitive(true)
            .match_kind(MatchKind::LeftmostLongest)
            .build(texts)
            .expect("the values of a snapshot are fewer bytes than the automaton can have");
        Replacer { placeholders: placeholders.by_value, searched, occurrences }
    }

    fn file(&self, path: &str, content: &[u8]) -> Vec<u8> {
        let Some(text) = text(content) else {
            // What it contains has no shape that a program could expect, but a size.
            return if is_identifier(path) { vec![0; content.len()] } else { content.to_vec() };
        };
        let mut replaced = String::with_capacity(text.len());
        let mut end = 0;
        for range in values(path, text) {
            replaced.push_str(&text[end..range.start]);
            end = range.end;
            let value = &text[range];
            replaced
                .push_str(self.placeholders.get(&value.to_ascii_lowercase()).map_or(value, String::as_str));
        }
        replaced.push_str(&text[end..]);
        self.occurrences(&replaced, |_| true).into_bytes()
    }

    fn name(&self, name: &str) -> String {
        self.occurrences(name, |occurrence| occurrence.is_in_names)
    }

    fn occurrences(&self, text: &str, is_wanted: impl Fn(&Occurrence) -> bool) -> String {
        let mut replaced = String::with_capacity(text.len());
        let mut end = 0;
        for found in self.searched.find_iter(text) {
            let occurrence = &self.occurrences[found.pattern().as_usize()];
            let is_here = !occurrence.is_word || is_word(text, found.start(), found.end());
            if is_wanted(occurrence) && is_here {
                replaced.push_str(&text[end..found.start()]);
                replaced.push_str(&occurrence.placeholder);
                end = found.end();
            }
        }
        replaced.push_str(&text[end..]);
        replaced
    }
}

fn is_word(text: &str, start: usize, end: usize) -> bool {
    let continues = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    !continues(start.checked_sub(1).and_then(|before| bytes.get(before))) && !continues(bytes.get(end))
}
