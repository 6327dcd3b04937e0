//! Hardware that pods have by a device plugin's own IDs, from the time before its adapter: no claim of another driver has it. Pure.

use std::collections::BTreeMap;

use nodedock_model::{ClaimRecord, DriverName, ExtendedResource, Problem, ProblemCode};

/// Checks the holds of the parts of a claim for which drivers are called. `held`: identity strings, each with the resource and the ID.
pub(super) fn check(
    record: &ClaimRecord,
    drivers: &[DriverName],
    held: &BTreeMap<String, (ExtendedResource, String)>,
) -> Result<(), Problem> {
    let is_called = |of: &Option<DriverName>| of.as_ref().is_some_and(|of| drivers.contains(of));
    let found = record.holds.iter().filter(|hold| is_called(&hold.driver));
    let found = found.filter_map(|hold| Some((hold, held.get(&hold.key)?))).next();
    let Some((hold, (resource, id))) = found else { return Ok(()) };
    let driver = hold.driver.as_ref().map(DriverName::as_str).unwrap_or_default();
    let message = format!(
        "claim {} wants {} by driver {driver}, and a pod has this hardware as {id:?} of {resource} from the time before the adapter of that",
        record.id, hold.key
    );
    Err(Problem::conflict(ProblemCode::DeviceHeld, message).with("device", &hold.key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::claims::fixtures::{claim, driver, pod};
    use nodedock_model::{ClaimState, Hold};

    #[test]
    fn hardware_of_a_pod_from_before_an_adapter_is_refused_to_the_drivers_that_are_called() {
        let id = claim("one", &["vfio/0"], &[&pod("a")]).id;
        let mut record = ClaimRecord::new(id, ClaimState::Preparing, "boot-1");
        let key = "pci:0000:3b:02.1".to_owned();
        record.holds =
            vec![Hold { key: key.clone(), shared: false, driver: Some(driver("vfio")), uses: Vec::new() }];
        let of = ("example.com/vf".parse().unwrap(), "0000:3b:02.1".to_owned());
        let held = [(key, of)].into();
        let problem = check(&record, &[driver("vfio")], &held).unwrap_err();
        assert_eq!(problem.code, "device-held");
        for text in ["pci:0000:3b:02.1", "driver vfio", "\"0000:3b:02.1\" of example.com/vf"] {
            assert!(problem.message.contains(text), "{problem}");
        }
        // A part that is prepared stays, and so does other hardware.
        assert!(check(&record, &[driver("gpu")], &held).is_ok());
        assert!(check(&record, &[driver("vfio")], &BTreeMap::new()).is_ok());
    }
}
