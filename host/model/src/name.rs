//! Names and identifiers, each checked when it is parsed.

use std::borrow::Borrow;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use sha2::{Digest, Sha256};

use super::limit::{
    DRIVER_NAME_BYTES_MAX, IDENTIFIER_BYTES_MAX, LABEL_BYTES_MAX, SUBDOMAIN_BYTES_MAX,
};

/// An invalid name: its kind, the truncated value, and the rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind} {shown} is not valid: {rule}")]
pub struct NameError {
    kind: &'static str,
    shown: String,
    rule: &'static str,
}

impl NameError {
    pub fn new(kind: &'static str, value: &str, rule: &'static str) -> Self {
        let mut shown: String = value.chars().take(64).collect();
        if shown.len() < value.len() {
            shown.push('…');
        }
        Self {
            kind,
            shown: format!("{shown:?}"),
            rule,
        }
    }
}

/// Names of each type that a thread remembers.
const RECENT_MAX: usize = 8;

/// The names that a thread has read last. A record has each of its names several times, and records beside each other have the same names:
/// all of them share one text.
struct Recent<N>(RefCell<VecDeque<N>>);

impl<N: Borrow<str> + Clone> Recent<N> {
    const fn new() -> Self {
        Self(RefCell::new(VecDeque::new()))
    }

    /// Returns the name that a text is; one that is not remembered is parsed.
    fn read(
        &self,
        text: &str,
        parse: impl FnOnce(&str) -> Result<N, NameError>,
    ) -> Result<N, NameError> {
        let mut recent = self.0.borrow_mut();
        let known = recent
            .iter()
            .position(|name| Borrow::<str>::borrow(name) == text);
        let name = match known.and_then(|at| recent.remove(at)) {
            Some(name) => name,
            None => parse(text)?,
        };
        recent.truncate(RECENT_MAX - 1);
        recent.push_front(name.clone());
        Ok(name)
    }
}

struct NameVisitor<N>(fn(&str) -> Result<N, NameError>);

impl<N> Visitor<'_> for NameVisitor<N> {
    type Value = N;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<N, E> {
        (self.0)(text).map_err(E::custom)
    }
}

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $check:path, $rule:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
        pub struct $name(Arc<str>);

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                thread_local! {
                    static RECENT: Recent<$name> = const { Recent::new() };
                }
                deserializer.deserialize_str(NameVisitor(|text| {
                    RECENT.with(|recent| recent.read(text, |text| Self::new(text)))
                }))
            }
        }

        impl $name {
            /// Parses the name; the error names the rule that it breaks.
            pub fn new(value: impl AsRef<str>) -> Result<Self, NameError> {
                let value = value.as_ref();
                if $check(value) { Ok(Self(value.into())) } else { Err(NameError::new($kind, value, $rule)) }
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;
            fn try_from(value: String) -> Result<Self, NameError> {
                Self::new(value)
            }
        }

        impl FromStr for $name {
            type Err = NameError;
            fn from_str(value: &str) -> Result<Self, NameError> {
                Self::new(value)
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

name_type!(
    /// Name of a driver: a DNS subdomain of at most 63 bytes, in which letters may be upper-case (`resource.k8s.io/v1`).
    DriverName,
    "driver name",
    is_driver_name,
    "a DNS subdomain of at most 63 bytes is wanted, such as gpu.example.com"
);
name_type!(
    /// Name of a pool of devices: DNS subdomains joined by `/`, at most 253 bytes (`resource.k8s.io/v1`).
    PoolName,
    "pool name",
    is_pool_name,
    "DNS subdomains joined by '/', at most 253 bytes, are wanted"
);
name_type!(
    /// Name of a device in its pool: a DNS label of at most 63 bytes (`resource.k8s.io/v1`).
    DeviceName,
    "device name",
    is_dns_label,
    "a DNS label of at most 63 bytes is wanted: lower-case letters, digits and dashes"
);
name_type!(
    /// UID of a Kubernetes object. It is part of file names, so it has only letters, digits, `-`, `_` and `.`, at most 128,
    /// and begins and ends with a letter or a digit.
    Uid,
    "UID",
    is_uid,
    "1 to 128 letters, digits, '-', '_' or '.' are wanted, a letter or digit first and last"
);
name_type!(
    /// Namespace or name of a Kubernetes object: a DNS subdomain of at most 253 bytes.
    ObjectName,
    "object name",
    is_dns_subdomain,
    "a DNS subdomain of at most 253 bytes is wanted: lower-case letters, digits, '-' and '.'"
);
name_type!(
    /// Extended resource: `domain/name`, the domain not below `kubernetes.io` (Kubernetes, device plugins).
    ExtendedResource,
    "extended resource",
    is_extended_resource,
    "domain/name is wanted, outside kubernetes.io, such as example.com/gpu"
);
name_type!(
    /// Name of an attribute or a capacity: a C identifier of at most 32 bytes, optionally with a domain of at most 63 bytes before it
    /// (`resource.k8s.io/v1`).
    QualifiedName,
    "attribute or capacity name",
    is_qualified_name,
    "a C identifier of at most 32 bytes is wanted, with a DNS subdomain of at most 63 and '/' before it or none"
);

/// Digits of the hash in a shortened name.
const HASH_DIGITS: usize = 16;

impl ObjectName {
    /// Returns the name for a field that has less room: as it is, or its begin and a hash of the whole. `bytes_max`: at least 32. The result is
    /// a DNS subdomain, and also the value of a label if it has at most 63 bytes.
    pub fn within(&self, bytes_max: usize) -> Self {
        if self.0.len() <= bytes_max {
            return self.clone();
        }
        let hash = hex::encode(Sha256::digest(self.0.as_bytes()));
        // Names are ASCII.
        let begin = &self.0[..bytes_max - HASH_DIGITS - 1];
        let begin = begin.trim_end_matches(['-', '.']);
        Self(format!("{begin}-{}", &hash[..HASH_DIGITS]).into())
    }
}

/// A DNS label (RFC 1123, lower case) of at most 63 bytes.
pub fn is_dns_label(value: &str) -> bool {
    value.len() <= LABEL_BYTES_MAX && is_label_of_any_length(value)
}

fn is_label_of_any_length(value: &str) -> bool {
    is_identifier(value, b"-") && !value.bytes().any(|b| b.is_ascii_uppercase())
}

/// A DNS subdomain (RFC 1123, lower case) of at most 253 bytes. As in Kubernetes its labels have no separate bound: the name of
/// a pod, and of a claim for it, is often longer than 63 bytes.
pub fn is_dns_subdomain(value: &str) -> bool {
    value.len() <= SUBDOMAIN_BYTES_MAX && value.split('.').all(is_label_of_any_length)
}

/// Kubernetes accepts upper case, with a warning, and compares the letters as they are.
fn is_driver_name(value: &str) -> bool {
    is_domain(&value.to_ascii_lowercase())
}

fn is_domain(value: &str) -> bool {
    value.len() <= DRIVER_NAME_BYTES_MAX && is_dns_subdomain(value)
}

fn is_pool_name(value: &str) -> bool {
    value.len() <= SUBDOMAIN_BYTES_MAX && value.split('/').all(is_dns_subdomain)
}

fn is_uid(value: &str) -> bool {
    value.len() <= 128 && is_identifier(value, b"-_.")
}

/// The part after the domain of a qualified name (Kubernetes `IsQualifiedName`).
fn is_qualified_part(value: &str) -> bool {
    value.len() <= LABEL_BYTES_MAX && is_identifier(value, b"-_.")
}

/// ASCII letters, digits and some other characters, with a letter or a digit at each end.
pub(super) fn is_identifier(value: &str, others: &[u8]) -> bool {
    let is_plain = value
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || others.contains(&b));
    let edges = [value.bytes().next(), value.bytes().last()];
    is_plain
        && edges
            .iter()
            .all(|edge| edge.is_some_and(|byte| byte.is_ascii_alphanumeric()))
}

/// Key of a label, an annotation or a taint: a name of at most 63 bytes, optionally with a DNS subdomain and `/` before it.
pub fn is_label_key(value: &str) -> bool {
    match value.split_once('/') {
        Some((domain, name)) => is_dns_subdomain(domain) && is_qualified_part(name),
        None => is_qualified_part(value),
    }
}

/// Value of a label or a taint: empty, or with the rules of a key's name.
pub fn is_label_value(value: &str) -> bool {
    value.is_empty() || is_qualified_part(value)
}

fn is_extended_resource(value: &str) -> bool {
    let Some((domain, name)) = value.split_once('/') else {
        return false;
    };
    // The quota's name, `requests.` before it, must be a qualified name as well.
    let quota_fits = domain.len() + "requests.".len() <= SUBDOMAIN_BYTES_MAX;
    let native = domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
    is_dns_subdomain(domain)
        && quota_fits
        && !native
        && !value.starts_with("requests.")
        && is_qualified_part(name)
}

fn is_qualified_name(value: &str) -> bool {
    let (domain, id) = value
        .split_once('/')
        .map_or((None, value), |(domain, id)| (Some(domain), id));
    domain.is_none_or(is_domain) && is_c_identifier(id)
}

/// A C identifier of at most 32 bytes: the name of an attribute or capacity without its domain.
pub fn is_c_identifier(value: &str) -> bool {
    let bytes = value.as_bytes();
    let first = bytes
        .first()
        .is_some_and(|b| b.is_ascii_alphabetic() || *b == b'_');
    first
        && bytes.len() <= IDENTIFIER_BYTES_MAX
        && bytes
            .iter()
            .all(|b| b.is_ascii_alphanumeric() || *b == b'_')
}

/// A Kubernetes object: namespace, name and UID.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ObjectRef {
    pub namespace: ObjectName,
    pub name: ObjectName,
    pub uid: Uid,
}

impl ObjectRef {
    /// Parses the three parts; the error names the invalid one.
    pub fn new(namespace: &str, name: &str, uid: &str) -> Result<Self, NameError> {
        Ok(Self {
            namespace: ObjectName::new(namespace)?,
            name: ObjectName::new(name)?,
            uid: Uid::new(uid)?,
        })
    }
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_names_share_their_text() {
        let read = |text: &str| serde_json::from_str::<Vec<Uid>>(text);
        let names = read(r#"["a", "b", "a"]"#).unwrap();
        assert!(Arc::ptr_eq(&names[0].0, &names[2].0) && names[0] != names[1]);
        let many: Vec<_> = (0..3 * RECENT_MAX)
            .map(|n| format!("n{}", n % 11))
            .collect();
        let json = serde_json::to_string(&many).unwrap();
        let names: Vec<_> = read(&json).unwrap().iter().map(Uid::to_string).collect();
        assert_eq!(names, many);
        for (bad, words) in [
            (r#"["a", ""]"#, "UID \"\" is not valid"),
            (
                r#"["a", 1]"#,
                "invalid type: integer `1`, expected a string",
            ),
        ] {
            let error = read(bad).unwrap_err().to_string();
            assert!(error.starts_with(words), "{error}");
        }
        let error = serde_json::from_str::<Vec<DeviceName>>(r#"["A"]"#).unwrap_err();
        assert!(error.to_string().starts_with("device name"), "{error}");
    }

    #[test]
    fn driver_names_are_short_dns_subdomains() {
        for good in [
            "a",
            "gpu.example.com",
            "device-nodes.nodedock.dev",
            "GPU.example.com",
        ] {
            assert!(DriverName::new(good).is_ok(), "{good}");
        }
        let long = "a".repeat(64);
        for bad in ["", "a..b", "a/b", "a\nb", "-a", "a-", long.as_str()] {
            assert!(DriverName::new(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn object_names_have_the_kubernetes_length() {
        for good in ["a".repeat(253), format!("{}.b", "a".repeat(64))] {
            assert!(ObjectName::new(&good).is_ok(), "{good}");
        }
        for bad in [
            "a".repeat(254),
            "a..b".to_owned(),
            String::new(),
            "a.-b".to_owned(),
            "A".to_owned(),
        ] {
            assert!(ObjectName::new(&bad).is_err(), "{bad}");
        }
        assert!(DeviceName::new("a".repeat(64)).is_err());
    }

    #[test]
    fn uids_cannot_leave_a_file_name() {
        assert!(Uid::new("6f1c2d7e-0f7b-4d1f-9d3b-2a6f0e9c1b11").is_ok());
        for bad in ["", "../x", "a/b", ".", "a\0b", "-a", &"a".repeat(129)] {
            assert!(Uid::new(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn extended_resources_need_their_own_domain() {
        assert!(ExtendedResource::new("example.com/gpu").is_ok());
        for bad in [
            "cpu",
            "kubernetes.io/gpu",
            "x.kubernetes.io/gpu",
            "requests.example.com/gpu",
            "example.com/",
            "/a",
        ] {
            assert!(ExtendedResource::new(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn name_errors_stay_short() {
        let error = DeviceName::new("x".repeat(10_000)).unwrap_err().to_string();
        assert!(error.starts_with("device name \"xxx"), "{error}");
        assert!(error.len() < 300, "{error}");
    }

    #[test]
    fn attribute_names_are_c_identifiers() {
        for good in ["model", "resource.kubernetes.io/pcieRoot", "_x"] {
            assert!(QualifiedName::new(good).is_ok(), "{good}");
        }
        for bad in ["", "a-b", "a/b/c", "/x", "A.example/x", "1x"] {
            assert!(QualifiedName::new(bad).is_err(), "{bad:?}");
        }
    }
}
