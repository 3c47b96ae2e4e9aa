//! Which partition a key belongs to, on brokers that leave that to us.

use message::Message;

/// One of `partitions`: the same for all messages of a key, in every version of this program. Without a key, by id.
pub(crate) fn partition(message: &Message, partitions: u32) -> u32 {
    let hash = match &message.key {
        Some(key) => fnv1a(key.as_bytes()),
        None => fnv1a(message.id.0.as_bytes()),
    };
    (hash % u64::from(partitions)) as u32
}

/// FNV-1a, folded. Written out here because the partition of a key must be the same in every version.
pub(crate) fn fnv1a(bytes: &[u8]) -> u64 {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    hash ^ (hash >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_partition_of_a_key_never_changes() {
        let partitions: Vec<_> =
            ["", "a", "42", "customer-7", "żółć"].iter().map(|key| fnv1a(key.as_bytes()) % 16).collect();
        assert_eq!(partitions, [1, 0, 4, 10, 4]);
    }

    #[test]
    fn keys_spread_evenly_over_partitions() {
        let mut counts = [0; 16];
        for n in 0..16_000 {
            let message = Message::new("orders", "").key(format!("customer-{n}"));
            counts[partition(&message, 16) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (800..1_200).contains(count)), "{counts:?}");
    }
}
