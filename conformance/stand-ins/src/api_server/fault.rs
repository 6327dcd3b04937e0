//! Faults that tests inject.

use serde_json::Value;

use super::seen::Seen;

/// A fault that replaces or accompanies the response to a request.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The connection is closed without an answer, and nothing is done.
    Away,
    /// Nothing comes back, and nothing is done.
    Hang,
    /// A page for people, with this code.
    Html(u16),
    /// A `Status` with this code.
    Status(u16),
    /// 429 with `Retry-After` in seconds.
    TooMany { retry_after: u64 },
    /// A watch is answered with 200 and ends; other requests are answered as ever.
    CloseWatchesAtOnce,
    /// A watch says that its resource version is too old (410 in an event) and ends; a list answers 410.
    Expire,
    /// The answer breaks off in its middle; a watch after half of its first event.
    HalfAnswer,
    /// The field is dropped from what is written, as a server does that does not know it: `spec.sharedCounters`,
    /// `spec.devices[*].taints`. The answer of the write lacks it too.
    DropField(String),
}

impl Fault {
    fn is_for(&self, verb: &str) -> bool {
        match self {
            Self::CloseWatchesAtOnce => verb == "watch",
            Self::Expire => matches!(verb, "watch" | "list"),
            Self::DropField(_) => matches!(verb, "create" | "update" | "patch"),
            _ => true,
        }
    }
}

/// The requests that a fault is for: those that match all fields that are set.
#[derive(Clone, Debug, Default)]
pub struct When {
    verb: Option<String>,
    resource: Option<String>,
    version: Option<String>,
    name: Option<String>,
}

impl When {
    /// Every request, also those for no resource.
    pub fn any() -> Self {
        Self::default()
    }

    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, `deletecollection`.
    pub fn verb(mut self, verb: &str) -> Self {
        self.verb = Some(verb.to_owned());
        self
    }

    /// The plural, with the subresource if one is meant: `resourceclaims/status`.
    pub fn resource(mut self, resource: &str) -> Self {
        self.resource = Some(resource.to_owned());
        self
    }

    pub fn version(mut self, version: &str) -> Self {
        self.version = Some(version.to_owned());
        self
    }

    pub fn name(mut self, name: &str) -> Self {
        self.name = Some(name.to_owned());
        self
    }

    pub(super) fn matches(&self, request: &Seen) -> bool {
        let is = |wanted: &Option<String>, found: &str| {
            wanted.as_deref().is_none_or(|wanted| wanted == found)
        };
        is(&self.verb, &request.verb)
            && is(&self.resource, &request.full_resource())
            && is(&self.version, &request.version)
            && is(&self.name, &request.name)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultId(u64);

#[derive(Debug, Default)]
pub(super) struct Faults {
    last: u64,
    all: Vec<Pending>,
}

#[derive(Debug)]
struct Pending {
    id: FaultId,
    fault: Fault,
    when: When,
    /// `None` until it is lifted.
    left: Option<usize>,
}

impl Faults {
    pub(super) fn add(&mut self, fault: Fault, when: When, left: Option<usize>) -> FaultId {
        self.last += 1;
        let id = FaultId(self.last);
        self.all.push(Pending {
            id,
            fault,
            when,
            left,
        });
        id
    }

    pub(super) fn lift(&mut self, id: FaultId) {
        self.all.retain(|pending| pending.id != id);
    }

    pub(super) fn lift_all(&mut self) {
        self.all.clear();
    }

    /// The faults that this request meets, oldest first; each is used up by one.
    pub(super) fn take(&mut self, request: &Seen) -> Vec<Fault> {
        let mut met = Vec::new();
        for pending in &mut self.all {
            let meant = pending.fault.is_for(&request.verb) && pending.when.matches(request);
            if meant && pending.left != Some(0) {
                pending.left = pending.left.map(|left| left - 1);
                met.push(pending.fault.clone());
            }
        }
        self.all.retain(|pending| pending.left != Some(0));
        met
    }
}

/// Removes a field: `spec.devices[*].taints`.
pub(super) fn drop_field(object: &mut Value, path: &str) {
    let Some((head, rest)) = path.split_once('.') else {
        object.as_object_mut().map(|fields| fields.remove(path));
        return;
    };
    let items = match head.strip_suffix("[*]") {
        Some(list) => object
            .get_mut(list)
            .and_then(Value::as_array_mut)
            .map(Vec::as_mut_slice),
        None => object.get_mut(head).map(std::slice::from_mut),
    };
    items
        .into_iter()
        .flatten()
        .for_each(|item| drop_field(item, rest));
}
