//! The resources that the server has.

/// The group of claims and slices.
pub const DRA_GROUP: &str = "resource.k8s.io";
/// The second group that events are served in.
pub const EVENTS_GROUP: &str = "events.k8s.io";
/// Every group is served in this version alone.
pub(crate) const VERSION: &str = "v1";

/// One kind of object.
#[derive(Debug, PartialEq, Eq)]
pub struct Resource {
    /// The group that its objects are stored in; events are served in [`EVENTS_GROUP`] too.
    pub group: &'static str,
    pub plural: &'static str,
    pub kind: &'static str,
    pub namespaced: bool,
    /// True if it has a `status` that only the subresource changes.
    pub status: bool,
    /// True if `metadata.generation` counts changes of the spec.
    pub generation: bool,
    /// Short names for kubectl.
    pub short_names: &'static [&'static str],
}

const fn cluster(group: &'static str, plural: &'static str, kind: &'static str) -> Resource {
    Resource {
        group,
        plural,
        kind,
        namespaced: false,
        status: false,
        generation: false,
        short_names: &[],
    }
}

const fn namespaced(group: &'static str, plural: &'static str, kind: &'static str) -> Resource {
    Resource {
        namespaced: true,
        ..cluster(group, plural, kind)
    }
}

pub(crate) const TAINT_RULES: &str = "devicetaintrules";

/// Resources in the order of discovery: by group and name.
pub(crate) static RESOURCES: [Resource; 9] = [
    Resource {
        short_names: &["ev"],
        ..namespaced("", "events", "Event")
    },
    Resource {
        status: true,
        short_names: &["ns"],
        ..cluster("", "namespaces", "Namespace")
    },
    Resource {
        status: true,
        short_names: &["no"],
        ..cluster("", "nodes", "Node")
    },
    Resource {
        status: true,
        generation: true,
        short_names: &["po"],
        ..namespaced("", "pods", "Pod")
    },
    Resource {
        generation: true,
        ..cluster(DRA_GROUP, "deviceclasses", "DeviceClass")
    },
    Resource {
        status: true,
        generation: true,
        ..cluster(DRA_GROUP, TAINT_RULES, "DeviceTaintRule")
    },
    Resource {
        status: true,
        ..namespaced(DRA_GROUP, "resourceclaims", "ResourceClaim")
    },
    namespaced(DRA_GROUP, "resourceclaimtemplates", "ResourceClaimTemplate"),
    Resource {
        generation: true,
        ..cluster(DRA_GROUP, "resourceslices", "ResourceSlice")
    },
];

/// Every resource, in the order of discovery; DeviceTaintRules are served as an option says.
pub fn resources() -> &'static [Resource] {
    &RESOURCES
}

/// Finds a resource by its plural or kind.
pub fn resource(name: &str) -> Option<&'static Resource> {
    RESOURCES
        .iter()
        .find(|resource| resource.plural == name || resource.kind == name)
}

/// Finds a resource by the `kind` and `apiVersion` of an object or a reference to one.
pub(crate) fn of_type(api_version: &str, kind: &str) -> Option<&'static Resource> {
    let group = api_version.split_once('/').map_or("", |(group, _)| group);
    RESOURCES
        .iter()
        .find(|resource| resource.kind == kind && resource.served_in(group))
}

pub(crate) fn api_version(group: &str) -> String {
    if group.is_empty() {
        VERSION.to_owned()
    } else {
        format!("{group}/{VERSION}")
    }
}

impl Resource {
    pub(crate) fn served_in(&self, group: &str) -> bool {
        self.group == group || (self.plural == "events" && group == EVENTS_GROUP)
    }

    /// Returns the name that error messages use: `resourceclaims.resource.k8s.io`.
    pub fn qualified(&self, group: &str) -> String {
        if group.is_empty() {
            self.plural.to_owned()
        } else {
            format!("{}.{group}", self.plural)
        }
    }
}
