//! Hardware that pods have by a device plugin's own IDs, from the time before its adapter: no claim of another driver has it. Pure.

use std::collections::BTreeMap;

use nodedock_model::{ClaimRecord, DriverName, ExtendedResource, Problem, ProblemCode};

/// Checks the holds of the parts of a claim for which drivers are called. `held`: identity strings, each with the resource and the ID.
pub(super) fn check(
    record: &ClaimRecord,
    drivers: &[DriverName],
    held: &BTreeMap<String, (ExtendedResource, String)>,
) -> Result<(), Problem> {
    let mut called = record.holds.iter().filter(|hold| {
        let of = hold.driver.as_ref();
        of.is_some_and(|of| drivers.contains(of))
    });
    let found = called.find_map(|hold| Some((hold, held.get(&hold.key)?)));
    let Some((hold, (resource, id))) = found else {
        return Ok(());
    };
    let driver = hold
        .driver
        .as_ref()
        .map(DriverName::as_str)
        .unwrap_or_default();
    let message = format!(
        "claim {} wants {} by driver {driver}, and a pod has this hardware as {id:?} of {resource} from the time before the adapter of that",
        record.id, hold.key
    );
    Err(Problem::conflict(ProblemCode::DeviceHeld, message).with("device", &hold.key))
}

/// Checks that it is known whether pods have the hardware of a claim. `unread`: identity strings of devices of which that is not known yet,
/// each with the resource and the driver of its adapter, which offers no devices meanwhile.
pub(super) fn check_read(
    record: &ClaimRecord,
    drivers: &[DriverName],
    unread: &BTreeMap<String, (ExtendedResource, DriverName)>,
) -> Result<(), Problem> {
    let found = record.holds.iter().find_map(|hold| {
        let (resource, adapter) = unread.get(&hold.key)?;
        let driver = hold
            .driver
            .as_ref()
            .filter(|driver| drivers.contains(driver) && *driver != adapter)?;
        Some((hold, driver, resource))
    });
    let Some((hold, driver, resource)) = found else {
        return Ok(());
    };
    let message = format!(
        "claim {} wants {} by driver {driver}, and it is not known yet whether a pod has this hardware as a device of {resource}: the kubelet has not said which devices its pods have",
        record.id, hold.key
    );
    Err(Problem::unavailable(ProblemCode::DeviceHeld, message).with("device", &hold.key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::claims::fixtures::{claim, driver, pod};
    use nodedock_model::{ClaimState, Hold, ProblemKind};

    #[test]
    fn hardware_of_earlier_pods_is_refused() {
        let id = claim("one", &["vfio/0"], &[&pod("a")]).id;
        let mut record = ClaimRecord::new(id, ClaimState::Preparing, "boot-1");
        let key = "pci:0000:3b:02.1".to_owned();
        record.holds = vec![Hold {
            key: key.clone(),
            shared: false,
            driver: Some(driver("vfio")),
            derived: false,
            uses: Vec::new(),
        }];
        let of = ("example.com/vf".parse().unwrap(), "0000:3b:02.1".to_owned());
        let held = [(key.clone(), of)].into();
        let problem = check(&record, &[driver("vfio")], &held).unwrap_err();
        assert_eq!(problem.code, "device-held");
        for text in [
            "pci:0000:3b:02.1",
            "driver vfio",
            "\"0000:3b:02.1\" of example.com/vf",
        ] {
            assert!(problem.message.contains(text), "{problem}");
        }
        let unread = |adapter: &str| {
            [(
                key.clone(),
                ("example.com/vf".parse().unwrap(), driver(adapter)),
            )]
            .into()
        };
        let unknown = check_read(&record, &[driver("vfio")], &unread("vf")).unwrap_err();
        assert!(
            unknown.kind == ProblemKind::Unavailable && unknown.message.contains("not known yet"),
            "{unknown}"
        );
        assert!(
            check_read(&record, &[driver("vfio")], &unread("vfio")).is_ok(),
            "the adapter's own"
        );
        assert!(check_read(&record, &[driver("gpu")], &unread("vf")).is_ok());
        // A part that is prepared stays, and so does other hardware.
        assert!(check(&record, &[driver("gpu")], &held).is_ok());
        assert!(check(&record, &[driver("vfio")], &BTreeMap::new()).is_ok());
    }
}
