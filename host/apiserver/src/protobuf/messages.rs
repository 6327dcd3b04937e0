//! The messages of Kubernetes' kinds: which field has which number and type.
//!
//! A word of `messages.txt` without a colon begins a message; its fields follow, as `NAME:NUMBER:TYPE`. Before the type, `~` is of a field
//! that JSON leaves out when it is zero, `*` of a list and `%` of a map with texts as keys. Without a type, a field is a text. Without a
//! name, its fields are those of the message that has it.

use std::collections::BTreeMap;
use std::sync::LazyLock;

/// Fields by number.
pub(super) type Message = BTreeMap<u64, Field>;

pub(super) static MESSAGES: LazyLock<BTreeMap<&'static str, Message>> =
    LazyLock::new(|| parse(include_str!("messages.txt")));

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) count: Count,
    pub(super) kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Count {
    One,
    OneUnlessZero,
    Many,
    Map,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    Int,
    Bool,
    Time,
    MicroTime,
    Quantity,
    IntOrText,
    /// JSON as bytes: opaque parameters, sets of fields.
    Json,
    Message(&'static str),
}

fn parse(table: &'static str) -> BTreeMap<&'static str, Message> {
    let mut messages = BTreeMap::new();
    let mut name = "";
    for word in table.split_ascii_whitespace() {
        match field(word) {
            Some((number, field)) => {
                messages
                    .entry(name)
                    .or_insert_with(Message::new)
                    .insert(number, field);
            }
            None => {
                name = word;
                messages.insert(name, Message::new());
            }
        }
    }
    messages
}

fn field(word: &'static str) -> Option<(u64, Field)> {
    let mut parts = word.splitn(3, ':');
    let (name, number) = (parts.next()?, parts.next()?.parse().ok()?);
    let kind = parts.next().unwrap_or("text");
    let counts = [
        ("~", Count::OneUnlessZero),
        ("*", Count::Many),
        ("%", Count::Map),
    ];
    let prefixed = counts
        .into_iter()
        .find_map(|(sign, count)| kind.strip_prefix(sign).map(|kind| (count, kind)));
    let (count, kind) = prefixed.unwrap_or((Count::One, kind));
    let kind = match kind {
        "text" => Kind::Text,
        "int" => Kind::Int,
        "bool" => Kind::Bool,
        "time" => Kind::Time,
        "microtime" => Kind::MicroTime,
        "quantity" => Kind::Quantity,
        "intOrString" => Kind::IntOrText,
        "json" => Kind::Json,
        message => Kind::Message(message),
    };
    Some((number, Field { name, count, kind }))
}
