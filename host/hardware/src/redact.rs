//! Replaces what identifies a machine in a snapshot. Pure.
//!
//! Two passes: the first finds the values, in the order of the paths; the second replaces them in contents, in paths and in targets of
//! links, since the same serial number or address is in several files, and in names such as `enx3cfdfea1b2c3`. Words that are not of the
//! vocabulary are replaced where they are.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use aho_corasick::{AhoCorasick, Input, MatchKind};

use crate::collect::Collector;
use crate::identifiers::{
    is_hardware_address, is_identifier, is_particular, is_value, placeholder, text, values_in,
    values_of_lines,
};
use crate::vocabulary::{is_kept, unknown_words};
use crate::{Entry, Snapshot};

/// Bytes of the name of a machine from which on it is replaced.
const NAME_BYTES_MIN: usize = 4;

/// Counts of replaced values.
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
    for (path, text) in texts(&snapshot) {
        values(path, text)
            .into_iter()
            .for_each(|range| placeholders.add(&text[range]));
    }
    placeholders.add_known(known, &snapshot);
    let names: HashSet<String> = snapshot
        .entries
        .keys()
        .flat_map(|path| path.split('/'))
        .map(str::to_owned)
        .collect();
    let names: HashSet<&str> = names.iter().map(String::as_str).collect();
    let mut words = placeholders.words();
    for (path, text) in texts(&snapshot) {
        let unknown = unknown_words(path, text, &names);
        unknown
            .into_iter()
            .for_each(|range| words.add(&text[range]));
    }
    let replacer = Replacer::new(placeholders, words, names);
    let mut redacted = Redacted {
        values: replacer.words.by_value.len(),
        ..Redacted::default()
    };
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
        let segments: Vec<_> = path
            .split('/')
            .filter(|segment| !segment.is_empty())
            .collect();
        redacted.dropped += usize::from(collector.add(&segments, entry).is_err());
    }
    (collector.into_snapshot(), redacted)
}

fn texts(snapshot: &Snapshot) -> Vec<(&str, &str)> {
    let files = snapshot.entries().filter_map(|(path, entry)| match entry {
        Entry::File(content) => Some((path, text(content)?)),
        _ => None,
    });
    files.collect::<Vec<_>>()
}

/// Values and their placeholders, without what all of a kind begin with.
#[derive(Default)]
struct Placeholders {
    by_value: HashMap<String, String>,
    addresses: usize,
    others: usize,
    /// Names of the machine: replaced as whole words in contents, regardless of their shape.
    names: HashSet<String>,
}

impl Placeholders {
    /// Begins with the values so far, for words that are replaced only where they are found.
    fn words(&self) -> Self {
        Self {
            by_value: self.by_value.clone(),
            names: HashSet::new(),
            ..*self
        }
    }

    /// A name that is also that of an entry, such as a driver's, says nothing about the machine elsewhere.
    fn add_known(&mut self, known: &[String], snapshot: &Snapshot) {
        let entries: HashSet<&str> = snapshot
            .entries
            .keys()
            .flat_map(|path| path.split('/'))
            .collect();
        for name in known.iter().map(|name| name.trim()) {
            if name.len() >= NAME_BYTES_MIN && is_value(name) && !entries.contains(name) {
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
        let count = if is_hardware_address(value) {
            &mut self.addresses
        } else {
            &mut self.others
        };
        *count += 1;
        let placeholder = placeholder(value, *count);
        self.by_value.insert(key, placeholder);
    }
}

/// Returns where a file has identifiers.
fn values(path: &str, text: &str) -> Vec<Range<usize>> {
    if is_identifier(path) {
        values_of_lines(text)
    } else {
        values_in(text)
    }
}

/// A text that is replaced wherever it occurs.
struct Occurrence {
    placeholder: String,
    /// Not within a longer word or number.
    is_word: bool,
    /// Also in paths and targets of links.
    is_in_names: bool,
}

struct Replacer<'a> {
    placeholders: HashMap<String, String>,
    words: Placeholders,
    /// Names of the snapshot's entries.
    names: HashSet<&'a str>,
    searched: AhoCorasick,
    occurrences: Vec<Occurrence>,
}

impl<'a> Replacer<'a> {
    fn new(placeholders: Placeholders, words: Placeholders, names: HashSet<&'a str>) -> Self {
        let mut texts = Vec::new();
        let mut occurrences = Vec::new();
        let mut values: Vec<_> = placeholders.by_value.iter().collect();
        values.sort();
        for (value, placeholder) in values {
            let is_name = placeholders.names.contains(value);
            if is_particular(value) || is_name {
                texts.push(value.clone());
                let placeholder = placeholder.clone();
                occurrences.push(Occurrence {
                    placeholder,
                    is_word: true,
                    is_in_names: !is_name,
                });
            }
            // As in the name of a network interface.
            if is_hardware_address(value) {
                texts.push(value.replace(':', ""));
                let placeholder = placeholder.replace(':', "");
                occurrences.push(Occurrence {
                    placeholder,
                    is_word: false,
                    is_in_names: true,
                });
            }
        }
        let searched = AhoCorasick::builder()
            .ascii_case_insensitive(true)
            .match_kind(MatchKind::LeftmostLongest)
            .build(texts)
            .expect("the values of a snapshot are fewer bytes than the automaton can have");
        Replacer {
            placeholders: placeholders.by_value,
            words,
            names,
            searched,
            occurrences,
        }
    }

    fn file(&self, path: &str, content: &[u8]) -> Vec<u8> {
        let mut replaced = Vec::with_capacity(content.len());
        let mut end = 0;
        let mut unknown = Vec::new();
        if let Some(text) = text(content) {
            unknown = unknown_words(path, text, &self.names);
            for range in values(path, text) {
                let value = &text[range.clone()];
                self.copy(content, end..range.start, &unknown, |_| true, &mut replaced);
                let placeholder = self.placeholders.get(&value.to_ascii_lowercase());
                replaced.extend_from_slice(placeholder.map_or(value, String::as_str).as_bytes());
                end = range.end;
            }
        } else if is_identifier(path) || !is_kept(path) {
            // What it contains has no shape that a program could expect, but a size.
            return vec![0; content.len()];
        }
        self.copy(
            content,
            end..content.len(),
            &unknown,
            |_| true,
            &mut replaced,
        );
        replaced
    }

    /// Replaces in a path or a target: in each segment, so that an entry and its directory change alike.
    fn name(&self, name: &str) -> String {
        name.split('/')
            .map(|segment| self.segment(segment))
            .collect::<Vec<_>>()
            .join("/")
    }

    fn segment(&self, segment: &str) -> String {
        let mut replaced = Vec::with_capacity(segment.len());
        self.copy(
            segment.as_bytes(),
            0..segment.len(),
            &[],
            |occurrence| occurrence.is_in_names,
            &mut replaced,
        );
        String::from_utf8(replaced).expect("whole texts are replaced by ASCII")
    }

    /// Copies a part of a content with placeholders. Placeholders that are written already are not searched: one may be like a value.
    fn copy(
        &self,
        content: &[u8],
        part: Range<usize>,
        unknown: &[Range<usize>],
        is_wanted: impl Fn(&Occurrence) -> bool,
        to: &mut Vec<u8>,
    ) {
        let mut end = part.start;
        for found in self
            .searched
            .find_iter(Input::new(content).range(part.clone()))
        {
            let occurrence = &self.occurrences[found.pattern().as_usize()];
            let is_here = !occurrence.is_word || is_word(content, found.range());
            if is_wanted(occurrence) && is_here {
                self.copy_words(content, end..found.start(), unknown, to);
                to.extend_from_slice(occurrence.placeholder.as_bytes());
                end = found.end();
            }
        }
        self.copy_words(content, end..part.end, unknown, to);
    }

    /// Copies a part in which no value occurs, with placeholders for unknown words.
    fn copy_words(
        &self,
        content: &[u8],
        part: Range<usize>,
        unknown: &[Range<usize>],
        to: &mut Vec<u8>,
    ) {
        let mut end = part.start;
        let first = unknown.partition_point(|word| word.end <= part.start);
        for word in unknown[first..]
            .iter()
            .take_while(|word| word.start < part.end)
        {
            // Of a word that has a value in it the rest is left.
            let word = word.start.max(part.start)..word.end.min(part.end);
            to.extend_from_slice(&content[end..word.start]);
            end = word.end;
            let text = String::from_utf8_lossy(&content[word]);
            let known = self.words.by_value.get(&text.to_ascii_lowercase());
            to.extend_from_slice(
                known
                    .map_or_else(|| placeholder(&text, 0), String::clone)
                    .as_bytes(),
            );
        }
        to.extend_from_slice(&content[end..part.end]);
    }
}

fn is_word(content: &[u8], found: Range<usize>) -> bool {
    let before = found
        .start
        .checked_sub(1)
        .and_then(|before| content.get(before));
    !continues(before) && !continues(content.get(found.end))
}

fn continues(byte: Option<&u8>) -> bool {
    byte.is_some_and(u8::is_ascii_alphanumeric)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(files: &[(&str, &[u8])]) -> Snapshot {
        let mut collector = Collector::default();
        for (path, content) in files {
            let segments: Vec<_> = path.split('/').skip(1).collect();
            collector
                .add(&segments, Entry::File(content.to_vec()))
                .unwrap();
        }
        collector.into_snapshot()
    }

    #[test]
    fn replaced_values_are_not_replaced_twice() {
        let [a, b] = ["/sys/a/net/a/address", "/sys/a/net/b/address"];
        let machine = snapshot(&[(a, b"3c:fd:fe:a1:b2:c3\n"), (b, b"02:00:00:00:00:01\n")]);
        let (redacted, counts) = machine.redacted(&[]);
        assert_eq!(
            redacted.get(a),
            Some(&Entry::File(b"02:00:00:00:00:01\n".to_vec()))
        );
        assert_eq!(
            redacted.get(b),
            Some(&Entry::File(b"02:00:00:00:00:02\n".to_vec()))
        );
        assert_eq!(
            counts,
            Redacted {
                values: 2,
                files: 2,
                dropped: 0
            }
        );
    }

    #[test]
    fn values_in_binary_content_are_replaced() {
        let machine = snapshot(&[
            ("/sys/a/serial", b"A50285BI"),
            ("/sys/a/descriptors", b"\0A50285BI\0xA50285BI"),
        ]);
        let (redacted, _) = machine.redacted(&[]);
        assert_eq!(
            redacted.get("/sys/a/descriptors"),
            Some(&Entry::File(b"\x0000000001\0xA50285BI".to_vec()))
        );
    }

    #[test]
    fn entries_with_colliding_names_are_counted() {
        let machine = snapshot(&[
            ("/sys/a/serial", b"A50285BI"),
            ("/sys/b/A50285BI", b"1"),
            ("/sys/b/00000001", b"2"),
        ]);
        let (redacted, counts) = machine.redacted(&[]);
        assert_eq!(
            redacted.get("/sys/b/00000001"),
            Some(&Entry::File(b"2".to_vec()))
        );
        assert_eq!(counts.dropped, 1);
    }
}
