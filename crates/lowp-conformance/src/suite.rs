//! [`crate::suite!`]: the laws, as tests.

/// One test of every law. A module `rig` beside it has `everywhere`, `once` and `together`: each hands a test what it
/// runs on. `everywhere`: everything that a backend can vary, as instruction sets and threads. `once`: the
/// backend as it is used. `together`: with every variant at once, where the reference is slow.
#[macro_export]
macro_rules! suite {
    () => {
        $crate::tests_of! {
            update {
                updates_equal_the_reference everywhere;
                many_steps_equal_the_reference everywhere;
                any_values_are_updated once;
                random_bits_are_those_of_the_matrix once;
                rules_mix_in_one_plan everywhere;
                fused_equals_update_then_encode once;
                updates_of_many_tasks_raise_lines everywhere;
            }
            update_checks {
                lines_are_of_the_shape_of_the_master once;
                masters_in_halves_are_not_cast once;
                missing_scalars_are_an_error once;
                a_skipped_run_changes_nothing once;
            }
            amax {
                pieces_of_a_matrix_raise_the_amaxes_of_the_whole once;
                transformed_values_have_amaxes_of_their_own everywhere;
                empty_matrices_raise_nothing once;
                sums_equal_the_reference everywhere;
                large_sums_equal_the_reference once;
                large_amaxes_run everywhere;
            }
            mutated {
                amax_jobs once;
                history_jobs once;
                sum_jobs once;
                encode_jobs once;
                flat_encode_jobs once;
                decode_jobs once;
                round_jobs once;
                momentum_jobs once;
                normalize_jobs once;
                update_jobs once;
                updates_of_short_tiles once;
                transpose_jobs once;
                repack_jobs once;
                interleave_jobs once;
                add_jobs once;
                convert_jobs once;
                add_parts_jobs once;
                step_scalars_jobs once;
                sides_and_sums_that_overflow_are_rejected once;
                what_is_stated_is_not_allocated once;
            }
            decode {
                every_ingredient_equals_the_reference everywhere;
                codes_survive_a_round_trip once;
                bf16_survives_a_round_trip once;
            }
            digests {
                outputs_are_those_of_the_snapshot everywhere;
            }
            encode {
                every_ingredient_equals_the_reference everywhere;
                stochastic_rounding_is_keyed_by_element everywhere;
                one_plan_encodes_many_tensors once;
                both_orientations_together_equal_each_alone once;
                a_transform_is_that_of_its_values everywhere;
            }
            errors {
                lengths_are_checked_and_named once;
                outputs_do_not_alias once;
                sources_and_slots_may_be_shared once;
                ingredients_must_exist once;
                blocks_fit_what_stands_above_them once;
                a_buffer_of_both_orientations_has_ingredients_of_both once;
                a_buffer_of_both_orientations_has_one_slot once;
                a_transform_is_of_whole_rows once;
                a_choice_is_of_whole_blocks once;
                the_number_of_a_tensor_is_what_the_rule_keeps once;
                required_parts_are_missed once;
                columns_must_be_whole_blocks once;
                ranges_of_buffers_are_checked once;
            }
            flat {
                any_split_equals_the_whole once;
                only_owned_nibbles_change once;
            }
            whole_tiles {
                every_ingredient_equals_the_reference once;
                stochastic_rounding_is_keyed_by_element once;
            }
            round {
                values_are_those_of_codes once;
                observed_amaxes_are_consumed once;
                what_is_not_rounded_is_said once;
            }
            forms {
                scales_are_written_in_every_form once;
                one_job_writes_several_forms once;
                forms_must_exist once;
            }
            golden {
                every_vector_of_every_family_and_shape once;
                each_usage_alone_gives_the_same_bytes once;
                a_bf16_source_gives_the_same_bytes once;
                a_recipe_by_direction_has_the_rows_of_one_and_the_columns_of_another once;
            }
            history {
                a_history_takes_the_amax_and_gives_the_scale once;
            }
            layout {
                transposing_twice_is_the_identity once;
                forms_lead_back_to_compact once;
                interleaving_concatenates_rows once;
                rearranging_moves_every_run once;
                runs_outside_of_their_buffers_are_rejected once;
                runs_that_are_none_or_one once;
                large_transposes_run everywhere;
            }
            momentum {
                a_momentum_equals_the_reference everywhere;
                a_matrix_is_divided_by_its_norm everywhere;
            }
            observed {
                scales_follow_from_observations once;
                observations_are_made_once once;
                lines_of_nothing_have_scales once;
                a_step_in_two_passes_follows_its_masters once;
                observations_must_fit once;
                known_values_are_taken_as_they_stand once;
            }
            step_scalars {
                any_gradient_equals_the_reference once;
                thousands_of_ranks_equal_the_reference once;
                counts_go_on_from_step_to_step once;
                a_step_of_the_device_equals_that_of_the_host once;
                scalars_in_a_buffer_must_fit once;
            }
            sum {
                every_pair_of_dtypes_equals_the_reference everywhere;
                conversions_keep_every_bit_they_can everywhere;
                one_plan_adds_many_vectors once;
                parts_are_added_in_their_order everywhere;
                parts_must_fit once;
            }
            time {
                a_pending_read_has_the_values_of_its_point once;
                pending_bytes_have_the_values_of_their_point once;
                large_writes_arrive_whole once;
                streams_follow_events once;
                a_graph_does_what_was_captured once;
                a_graph_spans_streams once;
                a_capture_takes_only_work once;
            }
            views {
                a_plan_works_on_parts_of_one_memory everywhere;
                parts_that_overlap_alias once;
                views_lie_within_their_buffers once;
            }
            values {
                all_bf16_values together;
                a_million_bit_patterns together;
                every_edge_of_blocks_and_vectors together;
                every_edge_of_chunks together;
                digests_of_all_bit_patterns together;
            }
        }
    };
}

/// One test of each law that is listed.
#[doc(hidden)]
#[macro_export]
macro_rules! tests_of {
    ($($module:ident { $($test:ident $variants:ident;)+ })+) => {
        $(mod $module {
            $(#[test]
            fn $test() {
                super::rig::$variants($crate::$module::$test);
            })+
        })+
    };
}
