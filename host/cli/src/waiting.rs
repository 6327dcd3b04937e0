//! Lines about claims of the local API that wait for devices.

use nodedock_command::describe;
use nodedock_proto::node::v1;

/// Why a claim is not allocated, with its place, the holders, and each device that it cannot have. `created`: since when it waits; empty: unknown.
pub(super) fn lines(waiting: &v1::WaitingClaim, created: &str) -> Vec<String> {
    let id = waiting
        .id
        .as_ref()
        .map(describe::object)
        .unwrap_or_default();
    let first = format!("claim {id} is not allocated: {}", waiting.reason);
    let place = (waiting.place > 0).then(|| {
        format!(
            "  place {} of the claims that wait for devices",
            waiting.place
        )
    });
    let holders = waiting.holders.iter();
    let holders =
        holders.map(|holder| format!("  claim {holder} has devices that this one could have"));
    let never = waiting.never.then(|| {
        "  it gets no devices when other claims end: change its requests, or wait for other devices".to_owned()
    });
    let more = waiting.more.then(|| "  and more devices".to_owned());
    [first]
        .into_iter()
        .chain((!created.is_empty()).then(|| format!("  it waits since {created}")))
        .chain(place)
        .chain(holders)
        .chain(never)
        .chain(waiting.excluded.iter().map(excluded_device))
        .chain(more)
        .collect()
}

fn excluded_device(excluded: &v1::ExcludedDevice) -> String {
    let v1::ExcludedDevice {
        request,
        driver,
        pool,
        device,
        reason,
    } = excluded;
    format!("  request {request}: {driver}/{pool}/{device}: {reason}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_claim_names_place_and_holders() {
        let waiting = v1::WaitingClaim {
            reason: "there are no devices".to_owned(),
            place: 2,
            holders: vec!["ml/train".to_owned()],
            ..v1::WaitingClaim::default()
        };
        let shown = lines(&waiting, "2026-01-01T00:00:00Z");
        let expected = [
            "claim  is not allocated: there are no devices",
            "  it waits since 2026-01-01T00:00:00Z",
            "  place 2 of the claims that wait for devices",
            "  claim ml/train has devices that this one could have",
        ];
        assert_eq!(shown, expected);
        let never = v1::WaitingClaim {
            never: true,
            ..v1::WaitingClaim::default()
        };
        let shown = lines(&never, "");
        assert!(
            shown.len() == 2 && shown[1].contains("when other claims end"),
            "{shown:?}"
        );
    }
}
