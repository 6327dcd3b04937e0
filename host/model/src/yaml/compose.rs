//! Documents of the events of a parser: keys, anchors and aliases, merged mappings.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use granit_parser::{Event, Parser, ScalarStyle, Span, Tag};
use serde_json::{Map, Value};

use super::{SyntaxError, scalar};

/// Nesting of a document, as `serde_json` has it for JSON.
const DEPTH_MAX: usize = 128;
/// Bytes of the values that have anchors, and of those that aliases repeat, in one text.
const ALIASED_BYTES_MAX: usize = 64 << 20;
/// Characters of the begin and of the end of a message, which may name a key or a number of any length.
const MESSAGE_PART_MAX: usize = 200;
/// Size of a value in memory, without the text that it has.
const VALUE_BYTES: usize = 64;
/// The tags of YAML itself, which are written `!!NAME`.
const YAML_TAGS: &str = "tag:yaml.org,2002:";

const NO_MAPPING: &str = "`<<` wants a mapping, or a list of mappings";

/// Whether a text may have aliases, with which it has more content than bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aliases {
    Expanded,
    Refused,
}

/// A list or a mapping whose end was not read yet.
struct Open {
    anchor: usize,
    node: Node,
}

enum Node {
    List(Vec<Value>),
    Mapping {
        fields: Map<String, Value>,
        /// Keys that are written in the mapping itself.
        own: HashSet<String>,
        key: Option<Key>,
    },
}

enum Key {
    Field(String),
    Merge,
}

struct Composer<'a> {
    aliases: Aliases,
    open: Vec<Open>,
    anchors: HashMap<usize, Value>,
    aliased_bytes: usize,
    done: &'a mut Vec<Value>,
}

/// Adds the documents of a part of a text.
pub(super) fn documents(
    text: &str,
    part: Range<usize>,
    aliases: Aliases,
    done: &mut Vec<Value>,
) -> Result<(), SyntaxError> {
    let before = &text[..part.start];
    let error = |at: &granit_parser::Marker, what: String| {
        let of_line = before
            .rsplit('\n')
            .next()
            .map_or(0, |line| line.chars().count());
        SyntaxError::At {
            line: before.matches('\n').count() + at.line(),
            column: at.col() + 1 + if at.line() == 1 { of_line } else { 0 },
            what: shortened(what),
        }
    };
    let mut composer = Composer {
        aliases,
        open: Vec::new(),
        anchors: HashMap::new(),
        aliased_bytes: 0,
        done,
    };
    for event in Parser::new_from_str(&text[part]) {
        let (event, span): (Event<'_>, Span) =
            event.map_err(|found| error(found.marker(), found.info()))?;
        composer
            .take(event)
            .map_err(|what| error(&span.start, what))?;
    }
    Ok(())
}

impl Composer<'_> {
    fn take(&mut self, event: Event<'_>) -> Result<(), String> {
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let is_plain = style == ScalarStyle::Plain;
                let is_merge = match tag.as_deref().and_then(yaml_tag) {
                    Some(tag) => tag == "merge",
                    None => tag.is_none() && is_plain,
                };
                if is_merge && text == "<<" && self.begin_merge() {
                    return Ok(());
                }
                let value = match tag.as_deref() {
                    None if is_plain => scalar::plain(&text)?,
                    None => text.into(),
                    Some(tag) => match yaml_tag(tag) {
                        Some(tag) => scalar::tagged(&tag, &text)?,
                        // A tag of another program says nothing about the value.
                        None => text.into(),
                    },
                };
                self.close(value, anchor)
            }
            Event::SequenceStart(_, anchor, _) => self.begin(anchor, Node::List(Vec::new())),
            Event::MappingStart(_, anchor, _) => {
                let (fields, own) = (Map::new(), HashSet::new());
                let mapping = Node::Mapping {
                    fields,
                    own,
                    key: None,
                };
                self.begin(anchor, mapping)
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(Open { anchor, node }) = self.open.pop() else {
                    return Err("the end of nothing".to_owned());
                };
                let value = match node {
                    Node::List(items) => items.into(),
                    Node::Mapping { fields, .. } => fields.into(),
                };
                self.close(value, anchor)
            }
            Event::Alias(anchor) => {
                let value = self.aliased(anchor)?;
                self.close(value, 0)
            }
            // Events without content, such as comments and the ends of documents.
            _ => Ok(()),
        }
    }

    fn begin(&mut self, anchor: usize, node: Node) -> Result<(), String> {
        if self.open.len() >= DEPTH_MAX {
            return Err(format!("more than {DEPTH_MAX} levels are nested"));
        }
        self.open.push(Open { anchor, node });
        Ok(())
    }

    /// Takes the key of a merge. Returns false where no key is expected.
    fn begin_merge(&mut self) -> bool {
        match self.open.last_mut() {
            Some(Open {
                node: Node::Mapping { key, .. },
                ..
            }) if key.is_none() => {
                *key = Some(Key::Merge);
                true
            }
            _ => false,
        }
    }

    /// Returns the value of an anchor once more.
    fn aliased(&mut self, anchor: usize) -> Result<Value, String> {
        if self.aliases == Aliases::Refused {
            return Err("aliases are not supported here".to_owned());
        }
        let value = self.anchors.get(&anchor);
        let value = value.ok_or("an alias is in the value that it repeats")?;
        let (bytes, depth) = size(value);
        if self.open.len() + depth > DEPTH_MAX {
            return Err(format!("more than {DEPTH_MAX} levels are nested"));
        }
        self.aliased_bytes = counted(self.aliased_bytes, bytes)?;
        Ok(value.clone())
    }

    /// Puts a whole value where it belongs.
    fn close(&mut self, value: Value, anchor: usize) -> Result<(), String> {
        // Without aliases nothing reads it.
        if anchor != 0 && self.aliases == Aliases::Expanded {
            self.aliased_bytes = counted(self.aliased_bytes, size(&value).0)?;
            self.anchors.insert(anchor, value.clone());
        }
        match self.open.last_mut().map(|open| &mut open.node) {
            None => self.done.push(value),
            Some(Node::List(items)) => items.push(value),
            Some(Node::Mapping { fields, own, key }) => match key.take() {
                None => {
                    let name = scalar::key(&value)?;
                    if !own.insert(name.clone()) {
                        return Err(format!("the key {name:?} is there twice"));
                    }
                    *key = Some(Key::Field(name));
                }
                Some(Key::Field(name)) => drop(fields.insert(name, value)),
                Some(Key::Merge) => merge(fields, value)?,
            },
        }
        Ok(())
    }
}

/// Returns a message without its middle if it is long.
fn shortened(message: String) -> String {
    let count = message.chars().count();
    if count <= 2 * MESSAGE_PART_MAX {
        return message;
    }
    let begin: String = message.chars().take(MESSAGE_PART_MAX).collect();
    let end: String = message.chars().skip(count - MESSAGE_PART_MAX).collect();
    format!("{begin}…{end}")
}

/// Adds bytes that are in memory beside the text.
fn counted(before: usize, bytes: usize) -> Result<usize, String> {
    let sum = before.saturating_add(bytes);
    if sum > ALIASED_BYTES_MAX {
        return Err(format!(
            "anchors and aliases repeat more than {ALIASED_BYTES_MAX} bytes"
        ));
    }
    Ok(sum)
}

/// The name of a tag of YAML itself.
fn yaml_tag(tag: &Tag) -> Option<String> {
    let name = tag.suffix_in_namespace(YAML_TAGS)?;
    Some(name.into_owned())
}

/// Adds the fields of a mapping, or of several, of which the first counts most.
fn merge(fields: &mut Map<String, Value>, merged: Value) -> Result<(), String> {
    match merged {
        Value::Object(one) => fields.extend(one),
        Value::Array(all) => {
            for one in all.into_iter().rev() {
                let Value::Object(one) = one else {
                    return Err(NO_MAPPING.to_owned());
                };
                fields.extend(one);
            }
        }
        _ => return Err(NO_MAPPING.to_owned()),
    }
    Ok(())
}

/// The bytes of a value in memory, about, and its nesting.
fn size(value: &Value) -> (usize, usize) {
    let add = |(bytes, depth): (usize, usize), (more, of): (usize, usize)| {
        (bytes.saturating_add(more), depth.max(of))
    };
    let nested = |(bytes, depth): (usize, usize)| (bytes.saturating_add(VALUE_BYTES), depth + 1);
    match value {
        Value::String(text) => (VALUE_BYTES + text.len(), 0),
        Value::Array(items) => nested(items.iter().map(size).fold((0, 0), add)),
        Value::Object(fields) => {
            let of_field = |(key, value): (&String, &Value)| {
                let (bytes, depth) = size(value);
                (bytes.saturating_add(VALUE_BYTES + key.len()), depth)
            };
            nested(fields.iter().map(of_field).fold((0, 0), add))
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => (VALUE_BYTES, 0),
    }
}
