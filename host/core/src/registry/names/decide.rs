//! Decides which source may serve under a driver's name. Pure.
//!
//! A name belongs to the source that is recorded for it, until that source is gone and no claim of the driver is left. A name without a
//! record belongs to the source that the claims name, if they name one. Otherwise the first source that serves gets it, after those whose
//! grant names it. A grant that names a driver takes the name from a source whose grant does not.

use std::collections::BTreeSet;

use nodedock_model::{DriverName, NameSource, SourceKind, is_plugin_driver};

/// The source that a name belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NameOwner {
    /// It served under the name, or was assigned it.
    Source(NameSource),
    /// The name has no record. What prepared its claims, or is stored for them, says who served.
    Evidence(Evidence),
    /// The name has a record that cannot be read.
    Unreadable,
}

/// Evidence of claims and stored files for the source of a driver that has no record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Evidence {
    /// A driver file or image of this name prepared its claims.
    Stem(String),
    /// Driver files of these digests did, and are not stored any more.
    Digests(BTreeSet<String>),
    /// A source of this kind did.
    Kind(SourceKind),
}

/// Known facts about a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceFacts {
    /// `None`: a native plugin that was not connected yet.
    pub source: Option<NameSource>,
    pub grant: Fact<DriverName>,
    /// Digest of a driver file.
    pub digest: Fact<String>,
    /// Name that it described last.
    pub described: Option<DriverName>,
}

/// Something that a file says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Fact<T> {
    #[default]
    Unread,
    Nothing,
    Is(T),
}

impl<T> From<Option<T>> for Fact<T> {
    fn from(fact: Option<T>) -> Self {
        fact.map_or(Self::Nothing, Self::Is)
    }
}

impl<T: PartialEq> Fact<T> {
    fn is(&self, wanted: &T) -> bool {
        matches!(self, Self::Is(fact) if fact == wanted)
    }
}

/// The state in which a source requests a name.
#[derive(Debug, Clone)]
pub(super) struct Known<'a> {
    pub(super) owner: Option<&'a NameOwner>,
    /// True if a claim of the driver is left, or may be.
    pub(super) has_claims: bool,
    /// Sources other than the requesting one.
    pub(super) others: Vec<&'a SourceFacts>,
    /// True if the owner serves under the name, regardless of the current content of its files.
    pub(super) is_served: bool,
    /// True if every existing driver file and image is among the sources.
    pub(super) is_listed: bool,
    /// True if the wait is over: a directory that is not listed by now no longer delays a name that no source is known to have.
    pub(super) is_late: bool,
    /// Native plugins may come yet: they register some time after a start.
    pub(super) plugins_may_come: bool,
    /// Another source that is about to serve under the name.
    pub(super) reserved: Option<&'a NameSource>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Decision {
    /// The name is the source's.
    Owns,
    /// The name becomes the source's.
    Binds,
    /// Not known yet: what other sources are is being read.
    Waits,
    Refused(NameRefusal),
}

/// Why a source may not serve under a name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameRefusal {
    #[error("its grant is for the driver {0}")]
    GrantOfAnother(DriverName),
    #[error("the name belongs to {0}")]
    Belongs(NameSource),
    #[error("{0} has a grant for this name")]
    Granted(NameSource),
    #[error("{0} describes it too, and came first")]
    Reserved(NameSource),
    #[error("the driver was served by {0} before")]
    Prepared(String),
    #[error("the record of the name's source in the checkpoint cannot be read")]
    Unreadable,
    #[error("the files of other drivers are not read yet")]
    Undecided,
    #[error("names below plugin.nodedock.dev are those of device plugins without an adapter")]
    OfPlugins,
}

impl NameRefusal {
    /// The source to which the name belongs, as a text.
    pub fn owner(&self) -> String {
        match self {
            Self::GrantOfAnother(driver) => format!("its grant is for {driver}"),
            Self::Belongs(source) | Self::Granted(source) | Self::Reserved(source) => {
                source.to_string()
            }
            Self::Prepared(by) => by.clone(),
            Self::Unreadable | Self::Undecided => "not known".to_owned(),
            Self::OfPlugins => "a device plugin".to_owned(),
        }
    }
}

/// Decides whether a source may serve under a name.
pub(super) fn decide(name: &DriverName, asking: &SourceFacts, known: &Known<'_>) -> Decision {
    let Some(source) = &asking.source else {
        return Decision::Waits;
    };
    if is_plugin_driver(name) {
        return Decision::Refused(NameRefusal::OfPlugins);
    }
    if let Fact::Is(granted) = &asking.grant
        && granted != name
    {
        return Decision::Refused(NameRefusal::GrantOfAnother(granted.clone()));
    }
    if let Some(NameOwner::Source(owner)) = known.owner
        && owner == source
    {
        return Decision::Owns;
    }
    let is_granted = asking.grant.is(name);
    match known
        .owner
        .map(|owner| (owner, presence(owner, name, known)))
    {
        None | Some((_, Presence::Gone)) => decide_free(name, source, is_granted, known),
        Some((NameOwner::Evidence(evidence), _)) if evidence.fits(asking) => {
            decide_free(name, source, is_granted, known)
        }
        Some((owner, presence)) => decide_owned(name, is_granted, known, owner, presence),
    }
}

/// A name that belongs to no source: a grant goes first, then the first source.
fn decide_free(
    name: &DriverName,
    source: &NameSource,
    is_granted: bool,
    known: &Known<'_>,
) -> Decision {
    if let Some(other) = known.reserved.filter(|other| *other != source) {
        return Decision::Refused(NameRefusal::Reserved(other.clone()));
    }
    if is_granted {
        return Decision::Binds;
    }
    let granted = known
        .others
        .iter()
        .find(|other| other.grant.is(name) && other.source.as_ref() != Some(source));
    if let Some(owner) = granted.and_then(|other| other.source.clone()) {
        return Decision::Refused(NameRefusal::Granted(owner));
    }
    let is_read = known.others.iter().all(|other| other.grant != Fact::Unread);
    if is_read && (known.is_listed || known.is_late) {
        Decision::Binds
    } else {
        Decision::Waits
    }
}

/// A name of another source: a grant that names it moves it, unless the owner's grant names it too.
fn decide_owned(
    name: &DriverName,
    is_granted: bool,
    known: &Known<'_>,
    owner: &NameOwner,
    presence: Presence,
) -> Decision {
    let owners = || known.others.iter().filter(|other| owner.fits(other));
    if is_granted && !owners().any(|other| other.grant.is(name)) {
        let is_read = known.is_listed && owners().all(|other| other.grant != Fact::Unread);
        return if is_read {
            Decision::Binds
        } else {
            Decision::Waits
        };
    }
    if presence == Presence::Unknown {
        return Decision::Waits;
    }
    Decision::Refused(match owner {
        NameOwner::Source(source) => NameRefusal::Belongs(source.clone()),
        NameOwner::Unreadable => NameRefusal::Unreadable,
        NameOwner::Evidence(evidence) => NameRefusal::Prepared(evidence.text()),
    })
}

/// Presence of the source of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Presence {
    /// It is there, or claims of the driver are.
    Here,
    Unknown,
    /// It is gone, and no claim is left.
    Gone,
}

pub(super) fn presence(owner: &NameOwner, name: &DriverName, known: &Known<'_>) -> Presence {
    let is_digest = matches!(owner, NameOwner::Evidence(Evidence::Digests(_)));
    match (owner, known.has_claims) {
        (NameOwner::Unreadable, _) => return Presence::Here,
        _ if known.is_served => return Presence::Here,
        // A digest says nothing without a file that has it.
        (_, true) if !is_digest => return Presence::Here,
        (_, false) if is_digest => return Presence::Gone,
        _ => {}
    }
    let has_name = |other: &&&SourceFacts| {
        other
            .described
            .as_ref()
            .is_none_or(|described| described == name)
    };
    let mut others = known.others.iter().filter(has_name);
    if others.clone().any(|other| owner.fits(other)) {
        return Presence::Here;
    }
    let is_unknown = match owner {
        NameOwner::Evidence(Evidence::Digests(_)) => {
            !known.is_listed || others.any(|other| other.digest == Fact::Unread)
        }
        NameOwner::Source(source) => is_unknown(source.kind, known),
        NameOwner::Evidence(Evidence::Kind(kind)) => is_unknown(*kind, known),
        NameOwner::Evidence(Evidence::Stem(_)) | NameOwner::Unreadable => {
            is_unknown(SourceKind::File, known)
        }
    };
    if is_unknown {
        Presence::Unknown
    } else {
        Presence::Gone
    }
}

/// Returns whether a source of a kind may exist without being known.
fn is_unknown(kind: SourceKind, known: &Known<'_>) -> bool {
    match kind {
        SourceKind::File | SourceKind::Image => !known.is_listed,
        SourceKind::Plugin => {
            known.plugins_may_come || known.others.iter().any(|other| other.source.is_none())
        }
        // The adapters and the CDI driver are there from the start.
        SourceKind::Adapter | SourceKind::Cdi | SourceKind::Pools => false,
    }
}

impl NameOwner {
    /// Returns whether a source is the owner.
    fn fits(&self, facts: &SourceFacts) -> bool {
        match self {
            Self::Source(owner) => facts.source.as_ref() == Some(owner),
            Self::Evidence(evidence) => evidence.fits(facts),
            Self::Unreadable => false,
        }
    }
}

impl Evidence {
    fn fits(&self, facts: &SourceFacts) -> bool {
        let Some(source) = &facts.source else {
            return false;
        };
        match self {
            Self::Stem(stem) => source.is_wasm() && source.name == *stem,
            Self::Digests(digests) => digests.iter().any(|digest| facts.digest.is(digest)),
            Self::Kind(kind) => {
                source.kind == *kind || source.is_wasm() && *kind == SourceKind::File
            }
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Stem(stem) => NameSource::file(stem).to_string(),
            Self::Digests(digests) => {
                let digests = digests
                    .iter()
                    .map(String::as_str)
                    .collect::<Vec<_>>()
                    .join(", ");
                format!("driver files of other digests ({digests})")
            }
            Self::Kind(SourceKind::Plugin) => "a native plugin".to_owned(),
            Self::Kind(SourceKind::Adapter) => "a device plugin with an adapter".to_owned(),
            Self::Kind(SourceKind::Cdi) => "a CDI driver".to_owned(),
            Self::Kind(_) => "a driver file".to_owned(),
        }
    }
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
