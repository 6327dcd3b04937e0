//! Classes of a machine whose operator has made none: one for each driver with devices. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{
    CELDeviceSelector, DeviceClass, DeviceClassSpec, DeviceSelector,
};
use kube::ResourceExt;
use kube::api::ObjectMeta;

/// Label of these classes, with the driver. A class that was changed is an operator's, whatever its labels.
const LABEL: &str = "nodedock.dev/default-class";

/// Changes of these classes.
#[derive(Debug, Default, PartialEq)]
pub(super) struct ClassChanges {
    pub(super) made: Vec<DeviceClass>,
    pub(super) removed: Vec<Arc<DeviceClass>>,
}

/// Returns the changes of these classes. `drivers`: with devices. A class stays while its driver has none, and is named as the driver up to the first
/// dot, or like the driver if another class has that name.
pub(super) fn changes<'a>(
    classes: impl Iterator<Item = &'a Arc<DeviceClass>>,
    drivers: &BTreeSet<&str>,
) -> ClassChanges {
    let mut names = BTreeSet::new();
    let mut defaults = BTreeMap::new();
    for class in classes {
        names.insert(class.name_any());
        defaults.extend(default_driver(class).map(|driver| (driver.to_owned(), class.clone())));
    }
    if names.len() > defaults.len() {
        return ClassChanges {
            made: Vec::new(),
            removed: defaults.into_values().collect(),
        };
    }
    let mut made = Vec::new();
    for driver in drivers
        .iter()
        .filter(|driver| !defaults.contains_key(**driver))
    {
        let short = driver.split('.').next().unwrap_or(driver);
        let name = [short, driver]
            .into_iter()
            .find(|name| names.insert((*name).to_owned()));
        made.extend(name.map(|name| default_class(name, driver)));
    }
    ClassChanges {
        made,
        removed: Vec::new(),
    }
}

/// Returns the driver of a class that is as it was made here.
fn default_driver(class: &DeviceClass) -> Option<&str> {
    let driver = class.labels().get(LABEL)?;
    (class.spec == spec_for(driver)).then_some(driver)
}

fn default_class(name: &str, driver: &str) -> DeviceClass {
    DeviceClass {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            labels: Some(BTreeMap::from([(LABEL.to_owned(), driver.to_owned())])),
            ..ObjectMeta::default()
        },
        spec: spec_for(driver),
    }
}

fn spec_for(driver: &str) -> DeviceClassSpec {
    let selector = DeviceSelector {
        cel: Some(CELDeviceSelector {
            expression: format!("device.driver == \"{driver}\""),
        }),
    };
    DeviceClassSpec {
        selectors: Some(vec![selector]),
        ..DeviceClassSpec::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(classes: &[DeviceClass]) -> Vec<String> {
        classes.iter().map(ResourceExt::name_any).collect()
    }

    fn kept(classes: Vec<DeviceClass>) -> Vec<Arc<DeviceClass>> {
        classes.into_iter().map(Arc::new).collect()
    }

    #[test]
    fn every_driver_gets_one_class() {
        let drivers = BTreeSet::from(["gpu.a.com", "gpu.b.com", "nic.a.com"]);
        let first = changes([].iter(), &drivers);
        assert_eq!(names(&first.made), ["gpu", "gpu.b.com", "nic"]);
        let made = kept(first.made);
        // The order in which drivers come changes no name.
        assert_eq!(changes(made.iter(), &drivers), ClassChanges::default());
        assert_eq!(
            changes(made.iter(), &BTreeSet::new()),
            ClassChanges::default()
        );
        let more = BTreeSet::from(["gpu.a.com", "gpu.c.com"]);
        assert_eq!(names(&changes(made.iter(), &more).made), ["gpu.c.com"]);
    }

    #[test]
    fn operator_class_replaces_all_others() {
        let drivers = BTreeSet::from(["gpu.a.com", "nic.a.com"]);
        let mut classes = kept(changes([].iter(), &drivers).made);
        // One that an operator changed is the operator's.
        let mut changed = DeviceClass::clone(&classes[0]);
        changed.spec.selectors = None;
        classes[0] = Arc::new(changed);
        let next = changes(classes.iter(), &drivers);
        assert_eq!(next.removed, classes[1..]);
        assert!(next.made.is_empty());
        assert_eq!(
            changes(classes[..1].iter(), &drivers),
            ClassChanges::default()
        );
    }
}
