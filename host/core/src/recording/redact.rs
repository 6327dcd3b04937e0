//! Replaces secrets in a recording by placeholders, so that it can leave the node and still be replayed.
//!
//! # The rule
//!
//! - **Where secrets come from.** Values of environment variables that the driver gives to containers, values in opaque parameters, and
//!   contents of files outside `/sys` that the driver read.
//! - **What is a secret.** Of these texts each word that has at least six letters or digits, where white space, quotes, backslashes and
//!   `,;:={}[]()<>` separate words. Not a secret is what stands in the driver's own file (the names that it compares with), a plain number of
//!   fewer than twelve digits, and a few words of the contract. Of an environment value of a WASM driver a word is a secret as far as it occurs
//!   in what the driver was passed or read: what it made up itself it makes up again in a replay.
//! - **What replaces it.** A placeholder of the same number of bytes and the same kinds of characters. Equal secrets have equal placeholders
//!   within a file, and other ones in another file.
//! - **Where.** Everywhere: in arguments, in what host functions were asked and returned, in answers and failures, in texts and bytes, in the
//!   grant and the config. Not in the driver's file, the names of functions and request ids.
//!
//! A driver that copies secrets replays to the same answers. One that computes with them may not; and what it computes, such as a hash, is
//! not recognised as a secret.

use std::collections::{BTreeMap, BTreeSet};

use aho_corasick::{AhoCorasick, BuildError, MatchKind};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::file::{ReadError, parse_line};
use super::{Answer, HostCall, Kind, Line, RecordedCall};

/// Letters and digits of a secret: shorter words are parts of paths, or numbers.
const SECRET_CHARACTERS_MIN: usize = 6;
/// Digits of a number that is a secret: shorter ones are sizes.
const SECRET_DIGITS_MIN: usize = 12;

/// Words of the contract that stand for themselves in a recording, as values.
const CONTRACT_WORDS: &[&str] = &[
    "Character",
    "Conflict",
    "Denied",
    "DeviceClass",
    "Dormant",
    "Healthy",
    "Internal",
    "Invalid",
    "LowerLayerDown",
    "NoExecute",
    "NoSchedule",
    "NotFound",
    "NotPresent",
    "Regular",
    "Request",
    "Testing",
    "Unavailable",
    "Unhealthy",
    "Unknown",
    "conflict",
    "denied",
    "internal",
    "invalid",
    "not-found",
    "unavailable",
    "Directory",
    "CreateContainer",
    "CreateRuntime",
    "Poststart",
    "Poststop",
    "Prestart",
    "StartContainer",
    "PREPARE",
    "UNPREPARE",
];

/// Why secrets cannot be replaced.
#[derive(Debug, thiserror::Error)]
pub enum RedactError {
    #[error("read what is recorded")]
    Read(#[from] ReadError),
    #[error("search for secrets")]
    Search(#[from] BuildError),
    #[error("write a line")]
    Write(#[from] serde_json::Error),
}

/// Returns the lines of a recording, without its header and its last line, with placeholders for secrets. Parses one line at a time.
pub fn redact(lines: &[&[u8]]) -> Result<Vec<Vec<u8>>, RedactError> {
    let words = words(lines)?;
    let known = known(lines, &words)?;
    let secrets: BTreeSet<_> = words
        .into_iter()
        .filter(|word| !known.contains(word))
        .collect();
    let placeholders = placeholders(&secrets);
    let (patterns, replacements): (Vec<_>, Vec<_>) = placeholders.into_iter().unzip();
    let matcher = AhoCorasick::builder()
        .match_kind(MatchKind::LeftmostLongest)
        .build(patterns)?;
    let mut kind = Kind::Wasm;
    let mut redaction = Redaction {
        matcher,
        replacements,
        has_data_in_keys: false,
    };
    let redacted = parsed(lines).map(|line| {
        let mut line = line?;
        match &mut line {
            Line::Revision(revision) => {
                kind = revision.kind;
                redaction.text(&mut revision.grant);
                revision
                    .config
                    .iter_mut()
                    .for_each(|config| redaction.text(config));
            }
            Line::Call(call) => {
                redaction.has_data_in_keys = kind == Kind::Native;
                redaction.call(call);
            }
            Line::Lost(_) | Line::File(_) | Line::End(_) => {}
        }
        Ok(serde_json::to_vec(&line)?)
    });
    redacted.collect()
}

fn parsed(lines: &[&[u8]]) -> impl Iterator<Item = Result<Line, ReadError>> {
    (2..)
        .zip(lines)
        .map(|(number, line)| parse_line(number, line))
}

/// The words that are secrets unless the driver knows them.
fn words(lines: &[&[u8]]) -> Result<BTreeSet<String>, RedactError> {
    let mut found = Words::default();
    let mut kind = Kind::Wasm;
    for line in parsed(lines) {
        match line? {
            Line::Revision(revision) => {
                kind = revision.kind;
                revision
                    .config
                    .iter()
                    .for_each(|config| split(config, &mut found.inputs));
            }
            Line::Call(call) => found.call(kind, &call),
            Line::Lost(_) | Line::File(_) | Line::End(_) => {}
        }
    }
    Ok(found.secrets()?)
}

/// Words by where they come from.
#[derive(Default)]
struct Words {
    /// Of parameters and files, and of environments that a native plugin made, whose inputs are not known.
    secrets: BTreeSet<String>,
    environment: BTreeSet<String>,
    /// Of everything that a driver was passed or read.
    inputs: BTreeSet<String>,
}

impl Words {
    fn call(&mut self, kind: Kind, call: &RecordedCall) {
        let RecordedCall {
            arguments,
            host,
            answer,
            ..
        } = call;
        self.collect(arguments);
        collect_texts(arguments, &mut self.inputs);
        if let Answer::Returned(answer) = answer {
            self.collect(answer);
        }
        for HostCall {
            function, answer, ..
        } in host
        {
            let Answer::Returned(answer) = answer else {
                continue;
            };
            self.collect(answer);
            collect_texts(answer, &mut self.inputs);
            if function == "host-files.read" {
                answer
                    .get("Ok")
                    .into_iter()
                    .for_each(|content| collect_texts(content, &mut self.secrets));
            }
        }
        if kind == Kind::Native {
            self.secrets.append(&mut self.environment);
        }
    }

    /// Collects from environments and opaque parameters, by the names of their fields.
    fn collect(&mut self, value: &Value) {
        match value {
            Value::Array(values) => values.iter().for_each(|value| self.collect(value)),
            Value::Object(fields) => {
                for (name, value) in fields {
                    match (name.as_str(), value) {
                        // `container-edits`, and the answer of a device plugin.
                        ("env", Value::Array(pairs)) => {
                            let values = pairs.iter().filter_map(|pair| pair.get("value"));
                            values.for_each(|value| collect_texts(value, &mut self.environment));
                        }
                        ("envs", value) => collect_texts(value, &mut self.environment),
                        ("parameters", Value::String(text)) => {
                            collect_parameters(text, &mut self.secrets)
                        }
                        _ => self.collect(value),
                    }
                }
            }
            _ => {}
        }
    }

    /// Of a word in an environment, that is a secret which occurs in an input. What a driver made up itself it makes up again.
    fn secrets(self) -> Result<BTreeSet<String>, BuildError> {
        let Self {
            mut secrets,
            environment,
            inputs,
        } = self;
        let within = |parts: &BTreeSet<String>, wholes: &BTreeSet<String>| {
            let parts: Vec<_> = parts.iter().collect();
            let matcher = AhoCorasick::new(&parts)?;
            let mut found = BTreeSet::new();
            for whole in wholes {
                let matches = matcher.find_overlapping_iter(whole);
                found.extend(matches.map(|part| parts[part.pattern().as_usize()].clone()));
            }
            Ok(found)
        };
        secrets.append(&mut within(&environment, &inputs)?);
        secrets.append(&mut within(&inputs, &environment)?);
        Ok(secrets)
    }
}

/// Collects from all texts and bytes.
fn collect_texts(value: &Value, words: &mut BTreeSet<String>) {
    match value {
        Value::String(text) => split(text, words),
        Value::Array(values) => match bytes(values) {
            Some(bytes) => split(&String::from_utf8_lossy(&bytes), words),
            None => values.iter().for_each(|value| collect_texts(value, words)),
        },
        Value::Object(fields) => fields
            .values()
            .for_each(|value| collect_texts(value, words)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Collects the values of a JSON text, and not its keys: from the values, and from the text, where they may be written in another way.
fn collect_parameters(text: &str, words: &mut BTreeSet<String>) {
    let (mut of_values, mut keys, mut of_text) =
        (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    if let Ok(value) = serde_json::from_str(text) {
        collect_json(&value, &mut of_values, &mut keys);
    }
    split(text, &mut of_text);
    words.extend(of_text.into_iter().filter(|word| !keys.contains(word)));
    words.append(&mut of_values);
}

fn collect_json(value: &Value, words: &mut BTreeSet<String>, keys: &mut BTreeSet<String>) {
    match value {
        Value::String(text) => split(text, words),
        Value::Array(values) => values
            .iter()
            .for_each(|value| collect_json(value, words, keys)),
        Value::Object(fields) => {
            for (key, value) in fields {
                split(key, keys);
                collect_json(value, words, keys);
            }
        }
        _ => {}
    }
}

/// Adds the words of a text that may be secrets.
fn split(text: &str, words: &mut BTreeSet<String>) {
    let is_separator =
        |c: char| c.is_whitespace() || c.is_control() || "\"'`\\,;:={}[]()<>".contains(c);
    let is_long =
        |word: &&str| word.chars().filter(|c| c.is_alphanumeric()).count() >= SECRET_CHARACTERS_MIN;
    let is_number = |word: &&str| {
        word.len() < SECRET_DIGITS_MIN
            && word
                .bytes()
                .all(|byte| byte.is_ascii_digit() || byte == b'.')
    };
    let found = text
        .split(is_separator)
        .filter(is_long)
        .filter(|word| !is_number(word));
    words.extend(
        found
            .filter(|word| !CONTRACT_WORDS.contains(word))
            .map(str::to_owned),
    );
}

/// The words that stand in a driver's file.
fn known(lines: &[&[u8]], words: &BTreeSet<String>) -> Result<BTreeSet<String>, RedactError> {
    let patterns: Vec<_> = words.iter().collect();
    // All matches and not only the first of overlapping ones: a word may be a part of another.
    let matcher = AhoCorasick::new(&patterns)?;
    let mut known = BTreeSet::new();
    for line in parsed(lines) {
        if let Line::File(file) = line? {
            let bytes = STANDARD.decode(&file.base64).unwrap_or_default();
            for found in matcher.find_overlapping_iter(&bytes) {
                known.insert(patterns[found.pattern().as_usize()].clone());
            }
        }
    }
    Ok(known)
}

fn placeholders(secrets: &BTreeSet<String>) -> BTreeMap<String, String> {
    let mut key = [0; 32];
    key[..16].copy_from_slice(uuid::Uuid::new_v4().as_bytes());
    key[16..].copy_from_slice(uuid::Uuid::new_v4().as_bytes());
    let (mut placeholders, mut used) = (BTreeMap::new(), BTreeSet::new());
    for secret in secrets {
        let mut attempts = (0u64..).map(|attempt| placeholder(&key, attempt, secret));
        let unused = attempts.find(|found| !secrets.contains(found) && !used.contains(found));
        let unused = unused.expect("six characters have many forms, and the attempts do not end");
        used.insert(unused.clone());
        placeholders.insert(secret.clone(), unused);
    }
    placeholders
}

/// The same number of bytes and kinds of characters, derived from the key.
fn placeholder(key: &[u8; 32], attempt: u64, secret: &str) -> String {
    let mut stream = Stream {
        key,
        attempt,
        secret,
        block: 0,
        bytes: Vec::new(),
    };
    let mut placeholder = String::with_capacity(secret.len());
    for (index, c) in secret.char_indices() {
        let mut from = |first: char, last: char| {
            let count = u32::from(last) - u32::from(first) + 1;
            char::from_u32(u32::from(first) + stream.next() % count).unwrap_or(first)
        };
        placeholder.push(match c {
            // A number stays one.
            '0' if index == 0 => c,
            '1'..='9' if index == 0 => from('1', '9'),
            '0'..='9' => from('0', '9'),
            'a'..='f' => from('a', 'f'),
            'g'..='z' => from('g', 'z'),
            'A'..='F' => from('A', 'F'),
            'G'..='Z' => from('G', 'Z'),
            c if !c.is_alphanumeric() => c,
            c => match c.len_utf8() {
                2 => from('à', 'ö'),
                3 => from('一', '龥'),
                _ => from('𐐨', '𐑏'),
            },
        });
    }
    placeholder
}

/// Pseudorandom numbers.
struct Stream<'a> {
    key: &'a [u8; 32],
    attempt: u64,
    secret: &'a str,
    block: u64,
    bytes: Vec<u8>,
}

impl Stream<'_> {
    fn next(&mut self) -> u32 {
        if self.bytes.len() < 4 {
            let mut hash = Sha256::new();
            hash.update(self.key);
            hash.update(self.attempt.to_le_bytes());
            hash.update(self.block.to_le_bytes());
            hash.update(self.secret);
            self.bytes = hash.finalize().to_vec();
            self.block += 1;
        }
        let rest = self.bytes.split_off(self.bytes.len() - 4);
        rest.into_iter()
            .fold(0, |number, byte| number << 8 | u32::from(byte))
    }
}

struct Redaction {
    matcher: AhoCorasick,
    replacements: Vec<String>,
    /// Names of fields may be a driver's data, and no replay reads them.
    has_data_in_keys: bool,
}

impl Redaction {
    fn call(&self, call: &mut RecordedCall) {
        self.value(&mut call.arguments);
        self.answer(&mut call.answer);
        for HostCall {
            arguments, answer, ..
        } in &mut call.host
        {
            self.value(arguments);
            self.answer(answer);
        }
    }

    fn answer(&self, answer: &mut Answer) {
        match answer {
            Answer::Returned(value) => self.value(value),
            Answer::Failed(failure) => self.text(&mut failure.message),
        }
    }

    fn value(&self, value: &mut Value) {
        match value {
            Value::String(text) => self.text(text),
            Value::Array(values) => match bytes(values) {
                Some(bytes) => {
                    let bytes = self.matcher.replace_all_bytes(&bytes, &self.replacements);
                    *values = bytes.into_iter().map(Value::from).collect();
                }
                None => values.iter_mut().for_each(|value| self.value(value)),
            },
            Value::Object(fields) if self.has_data_in_keys => {
                let redacted = std::mem::take(fields)
                    .into_iter()
                    .map(|(mut name, mut value)| {
                        self.text(&mut name);
                        self.value(&mut value);
                        (name, value)
                    });
                *fields = redacted.collect();
            }
            Value::Object(fields) => fields.values_mut().for_each(|value| self.value(value)),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    fn text(&self, text: &mut String) {
        if self.matcher.is_match(text.as_str()) {
            *text = self.matcher.replace_all(text, &self.replacements);
        }
    }
}

/// Bytes are lists of numbers.
fn bytes(values: &[Value]) -> Option<Vec<u8>> {
    let byte = |value: &Value| u8::try_from(value.as_u64()?).ok();
    if values.len() < SECRET_CHARACTERS_MIN {
        None
    } else {
        values.iter().map(byte).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::recording::{DriverFile, Revision};

    fn recording(call: RecordedCall, file: &str) -> Vec<Line> {
        let revision = Revision {
            kind: Kind::Wasm,
            ..Revision::native("gpu.example.com")
        };
        let file = DriverFile {
            digest: "sha256:00".to_owned(),
            base64: STANDARD.encode(file),
        };
        vec![Line::Revision(revision), Line::Call(call), Line::File(file)]
    }

    fn redacted(lines: &[Line]) -> Vec<Line> {
        let texts: Vec<_> = lines
            .iter()
            .map(|line| serde_json::to_vec(line).unwrap())
            .collect();
        let texts: Vec<_> = texts.iter().map(Vec::as_slice).collect();
        let redacted = redact(&texts).unwrap();
        redacted
            .iter()
            .map(|line| serde_json::from_slice(line).unwrap())
            .collect()
    }

    fn a_call() -> RecordedCall {
        let parameters =
            json!({"licenseKey": "Abc-123-XYZ", "mode": "time-slicing", "count": 12_345_678});
        let host = HostCall {
            function: "host-files.read".into(),
            arguments: json!(["/etc/vendor/license"]),
            answer: Answer::Returned(
                json!({"Ok": "serial=deadbeef01\nsize: 16777216\nAbc-123-XYZ\n"}),
            ),
        };
        RecordedCall {
            operation: "prepare".into(),
            request: "r-1".to_owned(),
            at_ms: 1,
            arguments: json!({"prepare": {"claims": [
                {"id": {"name": "x"}, "parameters": [{"source": "Claim", "parameters": parameters.to_string()}]},
            ]}}),
            host: vec![host],
            answer: Answer::Returned(json!([{"uid": "u", "outcome": {"Ok": {
                "edits": {"env": [{"key": "LICENSE", "value": "Abc-123-XYZ"}, {"key": "MODE", "value": "time-slicing"}]},
                "memo": b"serial deadbeef01".to_vec(),
            }}}])),
        }
    }

    #[test]
    fn secrets_are_replaced_alike_everywhere_and_what_the_driver_knows_is_not() {
        let redacted = redacted(&recording(a_call(), "\0asm licenseKey time-slicing serial"));
        let Line::Call(call) = &redacted[1] else {
            panic!("{redacted:?}")
        };
        let Answer::Returned(answer) = &call.answer else {
            panic!("{call:?}")
        };
        let edits = &answer[0]["outcome"]["Ok"];
        let placeholder = edits["edits"]["env"][0]["value"].as_str().unwrap();
        let form: String = placeholder
            .chars()
            .map(|c| if c.is_ascii_digit() { '1' } else { c })
            .collect();
        assert!(
            placeholder != "Abc-123-XYZ" && placeholder.len() == 11,
            "{placeholder}"
        );
        assert!(
            form.as_bytes()[3] == b'-' && &form[4..8] == "111-",
            "{placeholder}"
        );
        let parameters = call.arguments["prepare"]["claims"][0]["parameters"][0]["parameters"]
            .as_str()
            .unwrap();
        let parameters: Value = serde_json::from_str(parameters).unwrap();
        assert_eq!(
            parameters,
            json!({"licenseKey": placeholder, "mode": "time-slicing", "count": 12_345_678})
        );
        let Answer::Returned(file) = &call.host[0].answer else {
            panic!("{call:?}")
        };
        let file = file["Ok"].as_str().unwrap();
        assert!(
            file.contains(placeholder) && file.contains("size: 16777216"),
            "{file}"
        );
        let serial = &file["serial=".len()..][..10];
        assert!(
            serial != "deadbeef01" && serial.bytes().all(|byte| byte.is_ascii_hexdigit()),
            "{file}"
        );
        let memo: Vec<u8> = serde_json::from_value(edits["memo"].clone()).unwrap();
        assert_eq!(String::from_utf8(memo).unwrap(), format!("serial {serial}"));
        assert_eq!(edits["edits"]["env"][1]["value"], "time-slicing");
    }

    #[test]
    fn two_redactions_have_other_placeholders_and_without_the_file_the_driver_knows_nothing() {
        let redacted = || {
            let Line::Call(call) = redacted(&recording(a_call(), "")).swap_remove(1) else {
                panic!("a call")
            };
            call
        };
        let (one, two) = (redacted(), redacted());
        assert_ne!(one.answer, two.answer);
        assert!(
            !serde_json::to_string(&one)
                .unwrap()
                .contains("time-slicing")
        );
    }

    #[test]
    fn of_an_environment_the_words_that_came_from_outside_are_secrets() {
        let env = |value: &str| json!({"env": [{"key": "K", "value": value}]});
        let call = RecordedCall {
            arguments: json!({"claims": ["/dev/dri/renderXYZ9"]}),
            host: vec![HostCall {
                function: "sysfs.read".into(),
                arguments: json!(["serial"]),
                answer: Answer::Returned(json!({"Ok": b"hunter2-hunter2".to_vec()})),
            }],
            answer: Answer::Returned(json!([
                env("made-up-by-driver"),
                env("id-hunter2-hunter2"),
                env("renderXYZ9")
            ])),
            ..a_call()
        };
        let text = serde_json::to_string(&redacted(&recording(call.clone(), ""))).unwrap();
        assert!(
            text.contains("made-up-by-driver") && text.contains("\"id-"),
            "{text}"
        );
        assert!(
            !text.contains("hunter2") && !text.contains("renderXYZ9") && text.contains("/dev/dri/"),
            "{text}"
        );
        // Of a plugin it is not known what it read.
        let mut native = recording(call, "");
        native[0] = Line::Revision(Revision::native("gpu.example.com"));
        assert!(
            !serde_json::to_string(&redacted(&native))
                .unwrap()
                .contains("made-up-by-driver")
        );
    }

    #[test]
    fn the_enums_of_the_contract_keep_their_words() {
        let contract = concat!(
            include_str!("../../../../wit/claims.wit"),
            include_str!("../../../../wit/common.wit"),
            include_str!("../../../../wit/container-edits.wit"),
            include_str!("../../../../wit/facets.wit"),
            include_str!("../../../../wit/host.wit"),
            include_str!("../../../../wit/inventory.wit"),
        );
        let code = contract
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"));
        let code = code.collect::<Vec<_>>().join("\n");
        let enums: Vec<_> = code
            .split("enum ")
            .skip(1)
            .map(|rest| rest.split(['{', '}']).nth(1).unwrap())
            .collect();
        assert!(enums.len() > 8, "{enums:?}");
        for case in enums
            .iter()
            .flat_map(|cases| cases.split(','))
            .map(str::trim)
        {
            let words = case.split('-').map(|word| {
                let (first, rest) = word.split_at(word.len().min(1));
                first.to_uppercase() + rest
            });
            let name = words.collect::<String>();
            let mut found = BTreeSet::new();
            split(&name, &mut found);
            assert!(found.is_empty(), "{name} is missing in CONTRACT_WORDS");
        }
    }

    proptest! {
        #[test]
        fn no_secret_is_left_in_any_bytes_and_lengths_stay(secret in "[a-zA-Z0-9äß漢!@#%&*+./_-]{6,40}", beside in "\\PC{0,20}") {
            let is_secret = secret.chars().filter(|c| c.is_alphanumeric()).count() >= SECRET_CHARACTERS_MIN;
            prop_assume!(is_secret && !CONTRACT_WORDS.contains(&secret.as_str()));
            prop_assume!(!secret.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.'));
            let mut call = a_call();
            call.host[0].answer = Answer::Returned(json!({"Err": {"message": secret}}));
            call.answer = Answer::Returned(json!([{"env": [{"key": "K", "value": secret}], "text": format!("{beside} {secret}"), "memo": secret.as_bytes()}]));
            let redacted = redacted(&recording(call.clone(), ""));
            let Line::Call(call_after) = &redacted[1] else { panic!("a call") };
            let (before, after) = (serde_json::to_string(&call).unwrap(), serde_json::to_string(call_after).unwrap());
            prop_assert!(before.contains(&secret) && !after.contains(&secret), "{}", after);
            let Answer::Returned(answer) = &call_after.answer else { panic!("an answer") };
            let value = answer[0]["env"][0]["value"].as_str().unwrap();
            prop_assert_eq!(value.len(), secret.len());
            prop_assert!(answer[0]["text"].as_str().unwrap().ends_with(value));
            let memo: Vec<u8> = serde_json::from_value(answer[0]["memo"].clone()).unwrap();
            prop_assert_eq!(memo, value.as_bytes());
        }
    }
}
