//! What casts are kept by. Nothing of it needs Python, whose library no test can be linked with, so its source is taken in here.

#[path = "../src/recent.rs"]
mod recent;

use recent::Recent;

#[test]
fn the_value_that_was_not_used_for_longest_goes() {
    let mut of = Recent::new(2);
    assert_eq!(of.get(&"a").copied(), None);
    assert_eq!(of.put("a", 1), None);
    assert_eq!(of.put("b", 2), None);
    assert_eq!(of.get(&"a").copied(), Some(1));
    assert_eq!(of.put("c", 3), Some(2));
    assert_eq!((of.get(&"b").copied(), of.len()), (None, 2));
    // Being put counts as being used.
    assert_eq!(of.put("d", 4), Some(1));
    assert_eq!(
        (of.get(&"c").copied(), of.get(&"d").copied()),
        (Some(3), Some(4))
    );
}

#[test]
fn a_key_that_is_put_again_has_the_new_value_and_no_other_goes() {
    let mut of = Recent::new(2);
    assert_eq!(of.put("a", 1), None);
    assert_eq!(of.put("b", 2), None);
    assert_eq!(of.put("a", 3), Some(1));
    assert_eq!(
        (of.get(&"a").copied(), of.get(&"b").copied()),
        (Some(3), Some(2))
    );
}

#[test]
fn one_is_always_kept() {
    let mut of = Recent::new(0);
    assert_eq!(of.put("a", 1), None);
    assert_eq!(of.put("b", 2), Some(1));
    assert_eq!((of.get(&"b").copied(), of.len()), (Some(2), 1));
}

#[test]
fn a_value_that_is_taken_is_kept_no_longer() {
    let mut of = Recent::new(2);
    assert_eq!(of.put("a", 1), None);
    assert_eq!(of.take(&"a"), Some(1));
    assert_eq!((of.take(&"a"), of.len()), (None, 0));
}
