//! Shares of devices for claims that no scheduler allocated: of a device that allows several allocations each claim has a share, as a
//! scheduler would write it.

use uuid::Uuid;

use nodedock_allocator::allocate::consumed;
use nodedock_model::{AllocatedDevice, Device, Problem, ProblemCode, Uid};

/// Gives a claim a share of a device, if the device allows several allocations. What `allocated` consumes before are the amounts that the claim
/// requests. The share has the same ID each time for the same `place` among the devices of the claim.
///
/// # Errors
///
/// `invalid`: the device does not allow several allocations, and an amount is requested; or its capacities do not allow one.
pub fn give(
    allocated: &mut AllocatedDevice,
    device: &Device,
    claim: &Uid,
    place: usize,
) -> Result<(), Problem> {
    if !device.allow_multiple_allocations {
        return match allocated.consumed.keys().next() {
            None => Ok(()),
            Some(capacity) => Err(refused(
                allocated,
                &format!("capacity {capacity}: a claim has the whole device"),
            )),
        };
    }
    allocated.consumed =
        consumed(device, &allocated.consumed).map_err(|why| refused(allocated, &why))?;
    let of = format!("{claim}/{place}");
    allocated.share_id = Some(Uuid::new_v5(&Uuid::NAMESPACE_OID, of.as_bytes()).to_string());
    Ok(())
}

fn refused(allocated: &AllocatedDevice, why: &str) -> Problem {
    let AllocatedDevice {
        driver,
        pool,
        device,
        ..
    } = allocated;
    Problem::invalid(
        ProblemCode::CapacityExceeded,
        format!("device {driver}/{pool}/{device}: {why}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_model::{Capacity, DeviceName, DriverName, PoolName, QualifiedName};

    fn allocated(requested: &[(&str, &str)]) -> AllocatedDevice {
        let requested = requested.iter().map(|(name, amount)| (*name, *amount));
        AllocatedDevice {
            consumed: requested
                .map(|(name, amount)| (name.to_owned(), amount.to_owned()))
                .collect(),
            ..AllocatedDevice::whole(
                "r",
                DriverName::new("d.dev").unwrap(),
                PoolName::new("p").unwrap(),
                DeviceName::new("a").unwrap(),
            )
        }
    }

    fn device(is_shared: bool) -> Device {
        let capacity = Capacity {
            value: "8".to_owned(),
            policy: None,
        };
        Device {
            capacities: [(QualifiedName::new("cores").unwrap(), capacity)].into(),
            allow_multiple_allocations: is_shared,
            ..Device::default()
        }
    }

    #[test]
    fn shared_device_gives_share_and_amounts() {
        let claim = Uid::new("u-1").unwrap();
        let share = |requested: &[(&str, &str)]| {
            let mut allocated = allocated(requested);
            give(&mut allocated, &device(true), &claim, 0).unwrap();
            (
                allocated.share_id.unwrap(),
                allocated.consumed["cores"].clone(),
            )
        };
        let (id, amount) = share(&[]);
        assert_eq!((Uuid::parse_str(&id).is_ok(), amount.as_str()), (true, "8"));
        assert_eq!(share(&[("cores", "2")]), (id, "2".to_owned()));
    }

    #[test]
    fn bad_request_for_share_names_device() {
        let claim = Uid::new("u-1").unwrap();
        for (requested, is_shared, says) in [
            (("cores", "9"), true, "needs 9"),
            (("lanes", "1"), true, "does not have it"),
            (("cores", "2"), false, "has the whole device"),
        ] {
            let mut allocated = allocated(&[requested]);
            let problem = give(&mut allocated, &device(is_shared), &claim, 0).unwrap_err();
            assert!(
                problem.message.starts_with("device d.dev/p/a: capacity")
                    && problem.message.contains(says),
                "{problem}"
            );
        }
        let mut whole = allocated(&[]);
        give(&mut whole, &device(false), &claim, 0).unwrap();
        assert_eq!(whole, allocated(&[]));
    }
}
