//! Places in a manifest: the field that is not of its type, and its line in the file.

use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_saphyr::Spanned;

/// A field of an object, and its line if the text of the object is known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    field: Vec<Step>,
    line: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Key(String),
    Item(usize),
}

/// `line 14, field spec.containers[0].name`.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}")?;
        }
        if self.field.is_empty() {
            return match self.line {
                Some(_) => Ok(()),
                None => f.write_str("the object"),
            };
        }
        let space = if self.line.is_some() { ", " } else { "" };
        write!(f, "{space}field ")?;
        for (number, step) in self.field.iter().enumerate() {
            match step {
                Step::Key(key) if number == 0 => f.write_str(key)?,
                Step::Key(key) => write!(f, ".{key}")?,
                Step::Item(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

impl Place {
    /// Returns the field at which an object is no `T`.
    pub(super) fn of_mismatch<T: DeserializeOwned>(object: &Value) -> Self {
        let field = match serde_json::to_string_pretty(object) {
            Ok(text) => match serde_json::from_str::<T>(&text) {
                Err(error) => field_at(&text, error.line()),
                Ok(_) => Vec::new(),
            },
            // no error: without a field the place is the object
            Err(_) => Vec::new(),
        };
        Self { field, line: None }
    }

    /// Returns the same of an object that is an item of a list.
    pub(super) fn in_item(mut self, index: usize) -> Self {
        let steps = [Step::Key("items".to_owned()), Step::Item(index)];
        self.field.splice(0..0, steps);
        self
    }

    /// Returns the same with its line in a text; `document` counts from 1.
    pub(super) fn in_text(mut self, text: &str, document: usize) -> Self {
        // no error: the text was read before, and a place without a line is one
        let documents: Vec<Located> = serde_saphyr::from_multiple(text).unwrap_or_default();
        let document = document.checked_sub(1).and_then(|at| documents.get(at));
        self.line = document.map(|document| document.line_of(&self.field));
        self
    }
}

/// The field whose value ends or begins at a line of pretty JSON, which has a key, an item or a bracket in each line.
fn field_at(text: &str, wanted: usize) -> Vec<Step> {
    let (mut field, mut open) = (Vec::new(), Vec::<Option<usize>>::new());
    for (number, line) in text.lines().map(str::trim).enumerate() {
        let is_wanted = number + 1 == wanted;
        if line.starts_with(['}', ']']) {
            if is_wanted {
                return field;
            }
            open.pop();
            // The object itself is in no field.
            if !open.is_empty() {
                field.pop();
            }
            continue;
        }
        // The next index of a list; `None`: an object.
        let step = match open.last_mut() {
            None => None,
            Some(Some(next)) => {
                *next += 1;
                Some(Step::Item(*next - 1))
            }
            Some(None) => key_of(line).map(Step::Key),
        };
        field.extend(step.clone());
        if is_wanted {
            return field;
        }
        match line.chars().last() {
            Some('{') => open.push(None),
            Some('[') => open.push(Some(0)),
            _ => drop(step.and_then(|_| field.pop())),
        }
    }
    Vec::new()
}

/// The key with which a line of pretty JSON begins.
fn key_of(line: &str) -> Option<String> {
    let mut keys = serde_json::Deserializer::from_str(line).into_iter::<String>();
    // no error: the text was written by the serializer
    keys.next()?.ok()
}

/// The lines of a value and of what is in it.
struct Located {
    line: u64,
    content: Content,
}

enum Content {
    Map(Vec<(String, Located)>),
    List(Vec<Located>),
    Leaf,
}

impl Located {
    /// The line of a field, or of the innermost value on the way to it that is there.
    fn line_of(&self, field: &[Step]) -> u64 {
        let Some((step, rest)) = field.split_first() else {
            return self.line;
        };
        let inner = match (&self.content, step) {
            (Content::Map(entries), Step::Key(key)) => entries
                .iter()
                .find(|(known, _)| known == key)
                .map(|(_, value)| value),
            (Content::List(items), Step::Item(index)) => items.get(*index),
            _ => None,
        };
        inner.map_or(self.line, |inner| inner.line_of(rest))
    }
}

impl<'de> Deserialize<'de> for Located {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::<Content>::deserialize(deserializer)?;
        Ok(Self {
            line: spanned.referenced.line(),
            content: spanned.value,
        })
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ContentVisitor)
    }
}

struct ContentVisitor;

impl<'de> Visitor<'de> for ContentVisitor {
    type Value = Content;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Content, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Content::Map(entries))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Content, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            items.push(item);
        }
        Ok(Content::List(items))
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Content, D::Error> {
        Content::deserialize(deserializer)
    }

    fn visit_bool<E: serde::de::Error>(self, _: bool) -> Result<Content, E> {
        Ok(Content::Leaf)
    }

    fn visit_i64<E: serde::de::Error>(self, _: i64) -> Result<Content, E> {
        Ok(Content::Leaf)
    }

    fn visit_u64<E: serde::de::Error>(self, _: u64) -> Result<Content, E> {
        Ok(Content::Leaf)
    }

    fn visit_f64<E: serde::de::Error>(self, _: f64) -> Result<Content, E> {
        Ok(Content::Leaf)
    }

    fn visit_str<E: serde::de::Error>(self, _: &str) -> Result<Content, E> {
        Ok(Content::Leaf)
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Content, E> {
        Ok(Content::Leaf)
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<Content, E> {
        Ok(Content::Leaf)
    }
}
